"""The ready queue (keyed by device) and the event bus. Losing all of it loses nothing: the store brings it back (R5).

A lane holds the tasks of one device, ordered by their lane key; a task without a device is a lane of its own. **A lane
is closed while one of its tasks is leased or the device's lock holds an execution id of ours**; then nothing of it is
handed out, so two tasks of a device are never out at a time, in the whole cluster. Everything that may open a lane
(finish, give back, release of the lock, reopen) looks at those two facts again, in one atomic step with its own change.
A lock value that is not ours does not close the lane: a worker has to meet it, and say so (W2).

Raises `QueueUnavailable`.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

from msgspec import Struct


class Item(Struct, frozen=True, kw_only=True):
    """`told`: what its pusher knows of the task, for whoever takes it first. A queue may forget it."""

    task_id: str
    device_id: str | None
    lane_key: str
    due_at: datetime
    type: str = "script"
    told: str | None = None


class Leased(Struct, frozen=True, kw_only=True):
    """`free`: nobody had the device's lock when it was handed out, and `fence` is the last one known of the device then. A
    queue that does not see the locks leaves both out."""

    """An item in hand. `crashes`: how often a worker died with it in hand, as far as this queue remembers."""

    task_id: str
    device_id: str | None
    lane_key: str
    type: str
    lease: str  # names this hand-out; a finish or give-back under an older lease does nothing
    crashes: int = 0
    told: str | None = None
    free: bool = False
    fence: int | None = None


class Place(Struct, frozen=True, kw_only=True):
    """Where a task stands. `position` counts from 1 among the lane's due items; None while leased or not yet due."""

    task_id: str
    position: int | None
    leased: bool
    due: bool


class LaneView(Struct, frozen=True, kw_only=True):
    device_id: str
    length: int  # due items that wait


class Queue(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> str: ...

    async def push(self, items: Sequence[Item]) -> None:
        """Each task once: pushed again, it takes the newer due time and key. A leased item that is pushed again is
        queued anew and its lease is void: whoever pushed knows that the task is to run again. An item whose time has
        not come waits without being in the way of its lane."""
        ...

    async def take(self, owner: str, limit: int, *, wait_s: float, types: Sequence[str] | None = None) -> list[Leased]:
        """Waits up to `wait_s` for due items of open lanes and leases up to `limit` of them to `owner`: the smallest
        lane keys first, at most one per lane. Empty when nothing came. Sleeps until there is something, or the next
        item falls due: no polling."""
        ...

    async def renew(self, owner: str, ttl_s: float) -> None:
        """The owner lives: all its leases hold for another `ttl_s`."""
        ...

    async def reclaim(self) -> int:
        """Gives back what owners without a valid lease had in hand. Any master may call it at any time."""
        ...

    async def finish(self, leased: Sequence[Leased]) -> None:
        """W8: done with them. The lane opens unless the device's lock is held."""
        ...

    async def give_back(self, leased: Sequence[Leased], *, crashed: bool = False) -> None:
        """Back into the lane, place kept. `crashed`: its worker died with it in hand; it is counted."""
        ...

    async def reopen(self, device_ids: Sequence[str]) -> None:
        """Look at these lanes again (a lock expired, was restored or was removed behind our back)."""
        ...

    async def remove(self, task_ids: Sequence[str]) -> None:
        """The tasks are final. What is leased stays leased."""
        ...

    async def known(self, task_ids: Sequence[str]) -> set[str]:
        """Which of these the queue has, waiting, delayed or leased (R5 pushes the others)."""
        ...

    async def places(self, task_ids: Sequence[str]) -> dict[str, Place]:
        """Where they stand; unknown ones are left out."""
        ...

    async def lane(self, device_id: str, limit: int) -> list[str]:
        """Task ids that wait in the lane and are due, first one first."""
        ...

    async def lanes(self, after: str | None, limit: int) -> list[LaneView]:
        """Devices whose lane has waiting tasks, by device id."""
        ...

    async def ready(self) -> dict[str, int]:
        """Due items that wait, by priority."""
        ...

    async def entries(self, after: str | None, limit: int) -> list[str]:
        """All task ids in the queue, by id, page by page (the reconciler drops those without a task)."""
        ...


Event = dict[str, Any]
INNER: Final = frozenset(("task.log",))  # kinds of events that are signals among our own processes, not in the contract


class Events(Protocol):
    """Announcements to whoever listens now. No replay, may be lost, never blocks the sender."""

    async def publish(self, events: Sequence[Event]) -> None: ...

    def listen(self) -> AsyncIterator[Event]:
        """Events from the first step of the iterator on. A listener that is too slow gets `{"event": "reset"}` in place
        of what was dropped."""
        ...
