"""What the Pulsar client library has to say, as log lines of ours: warnings and errors, a few at a time.

The library logs from its own threads. A Python logger there would be asked for every debug line and would need the
interpreter's lock under the library's; so the library writes into a pipe, and a thread of ours reads it.
While a broker is away it reports each try to connect: after BURST lines in WINDOW_S the rest is only counted.
"""

import contextvars
import fcntl
import os
import threading
import time
from functools import cache
from typing import Any

import pulsar

from scriptdispatch import logs

BURST = 5
WINDOW_S = 60.0
PIPE_BYTES = 1024 * 1024  # the library's threads would wait if it were full
LONGEST = 400
log = logs.get("pulsar")


@cache
def library_logger() -> Any:
    """The `logger` of every client in this process: the library has only one."""
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        try:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError as error:  # the user's pipes may not grow: the default of 64 KiB holds some 400 lines
            log.debug("the library's log keeps a small pipe", error=str(error))
    here = contextvars.copy_context()  # which process it is, for these lines as for all others
    threading.Thread(target=here.run, args=(_forward, reading), name="pulsar-log", daemon=True).start()
    # The library opens its own end by name. Ours stays open too, so that the reader never sees an end between clients.
    return pulsar.FileLogger(pulsar.LoggerLevel.Warn, f"/dev/fd/{writing}")


def _forward(reading: int) -> None:
    """Runs in its own thread, as long as the process."""
    pace = Pace()
    with os.fdopen(reading, "rb", buffering=64 * 1024) as lines:
        for line in lines:
            held_back = pace.admit(time.monotonic())
            if held_back is not None:
                more = {"lines_held_back": held_back} if held_back else {}
                log.warning(_cut(line.decode(errors="replace")), event_name="pulsar.library", **more)


class Pace:
    """BURST lines in a window, the others are counted."""

    def __init__(self) -> None:
        self._began = float("-inf")
        self._said = self._held_back = 0

    def admit(self, now: float) -> int | None:
        """None: not this one. Else how many were held back before it."""
        if now - self._began >= WINDOW_S:
            self._began, self._said = now, 0
        if self._said >= BURST:
            self._held_back += 1
            return None
        self._said += 1
        held_back, self._held_back = self._held_back, 0
        return held_back


def _cut(line: str) -> str:
    """Without its time and level, which our line has: `2026-01-01 12:00:00.000 ERROR [1] File:1 | what happened`."""
    return (line.partition(" | ")[2] or line).strip()[:LONGEST]
