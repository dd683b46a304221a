"""Which worker gets a task (SPEC 3.5). Pure: the dispatcher shows what each worker has in hand."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Balance = Literal["device_load", "fewest", "round_robin", "consistent_hash"]


@dataclass(slots=True)
class Hand:
    """A worker as the balancer sees it: ready, below its capacity, serving the task's type."""

    worker_id: str
    load: int = 0
    devices: Counter[str] = field(default_factory=Counter)


def device_load(hands: Sequence[Hand], device_id: str | None, turn: int) -> Hand:
    """No device: fewest tasks. Else of those not handling it the one with fewest tasks, else fewest of this device."""
    if device_id is None:
        return fewest(hands, device_id, turn)
    strangers = [hand for hand in hands if not hand.devices[device_id]]
    if strangers:
        return fewest(strangers, device_id, turn)
    return min(hands, key=lambda hand: (hand.devices[device_id], hand.load, hand.worker_id))


def fewest(hands: Sequence[Hand], device_id: str | None, turn: int) -> Hand:
    return min(hands, key=lambda hand: (hand.load, hand.worker_id))


def round_robin(hands: Sequence[Hand], device_id: str | None, turn: int) -> Hand:
    return sorted(hands, key=lambda hand: hand.worker_id)[turn % len(hands)]


def consistent_hash(hands: Sequence[Hand], device_id: str | None, turn: int) -> Hand:
    """Rendezvous hashing: a device keeps its worker, and one that leaves moves only its own devices."""
    if device_id is None:
        return fewest(hands, device_id, turn)
    return max(hands, key=lambda hand: _weight(hand.worker_id, device_id))


def _weight(worker_id: str, device_id: str) -> bytes:
    return hashlib.blake2b(f"{worker_id}/{device_id}".encode(), digest_size=8).digest()


CHOOSERS: Final[dict[Balance, Callable[[Sequence[Hand], str | None, int], Hand]]] = {
    "device_load": device_load,
    "fewest": fewest,
    "round_robin": round_robin,
    "consistent_hash": consistent_hash,
}
