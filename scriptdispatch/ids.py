"""Time-ordered ids (UUIDv7) for tasks, executions, nodes and workers.

An execution id is also the value of a device lock, so `is_id` tells a lock of ours from one that a person or another
system has set.
"""

import hashlib
import os
import re
import threading
import time
import uuid

_PATTERN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_lock = threading.Lock()
_last = 0  # (milliseconds << 12) + counter of the newest id of this process


def new_id() -> str:
    """A fresh UUIDv7. Ids of one process rise strictly, also within one millisecond."""
    global _last
    with _lock:
        _last = max(_last + 1, int(time.time() * 1000) << 12)
        stamp = _last
    return _format(stamp >> 12, stamp & 0xFFF, os.urandom(8))


def derived_id(seed: str, index: int) -> str:
    """The id that a repeated request (same seed) chooses again: time from the seed, the rest from its hash."""
    ms = int(seed[:8] + seed[9:13], 16)
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    # The index takes the counter's place, so that items of a batch keep their order.
    return _format(ms, index & 0xFFF, digest[:8])


def is_id(value: str) -> bool:
    return _PATTERN.fullmatch(value) is not None


def _format(ms: int, counter: int, tail: bytes) -> str:
    low = int.from_bytes(tail, "big") & 0x3FFF_FFFF_FFFF_FFFF
    number = (ms & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | counter << 64 | 0b10 << 62 | low
    return str(uuid.UUID(int=number))
