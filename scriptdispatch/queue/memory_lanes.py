"""Items, lanes and locks of the memory queue, and the one place that decides whether a lane is open. No waiting here.

Everything sorted is a list kept in order by bisection. Locks live here too, so that a lane and its device's lock are
looked at in one step.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from scriptdispatch.domain.lanes import lane_of
from scriptdispatch.ids import is_id
from scriptdispatch.queue.port import Item


@dataclass(slots=True)
class Entry:
    """Waiting, delayed (not in its lane yet), or leased."""

    item: Item
    lane: str
    delayed: bool = False
    owner: str | None = None
    lease: str | None = None
    crashes: int = 0

    @property
    def place(self) -> tuple[str, str]:
        return self.item.lane_key, self.item.task_id


@dataclass(slots=True)
class HeldLock:
    value: str
    task_id: str | None
    since: datetime | None
    expires_at: datetime | None  # None: set by somebody else, without an end

    def in_force(self, now: datetime) -> bool:
        return self.expires_at is None or self.expires_at > now


@dataclass(slots=True)
class Lane:
    waiting: list[tuple[str, str]] = field(default_factory=list)  # (lane key, task id), in order
    leased: set[str] = field(default_factory=set)
    ready: tuple[str, str] | None = None  # its entry among the ready lanes


class Lanes:
    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.lanes: defaultdict[str, Lane] = defaultdict(Lane)
        self.ready: list[tuple[str, str]] = []  # (head key, lane) of the open lanes, in order
        self.delayed: list[tuple[datetime, str]] = []  # (due, task id), in order
        self.locks: dict[str, HeldLock] = {}

    def put(self, item: Item, now: datetime) -> None:
        """Anew, wherever it was before; a lease it had is void."""
        old = self.entries.get(item.task_id)
        if old is not None:
            self.drop(old)
        entry = Entry(item, lane_of(item.task_id, item.device_id), crashes=old.crashes if old else 0)
        self.entries[item.task_id] = entry
        if item.due_at > now:
            entry.delayed = True
            insort(self.delayed, (item.due_at, item.task_id))
        else:
            insort(self.lanes[entry.lane].waiting, entry.place)

    def drop(self, entry: Entry) -> None:
        del self.entries[entry.item.task_id]
        lane = self.lanes[entry.lane]
        if entry.lease is not None:
            lane.leased.discard(entry.item.task_id)
        elif entry.delayed:
            _cut(self.delayed, (entry.item.due_at, entry.item.task_id))
        else:
            _cut(lane.waiting, entry.place)

    def lease(self, entry: Entry, owner: str, lease: str) -> None:
        lane = self.lanes[entry.lane]
        _cut(lane.waiting, entry.place)
        lane.leased.add(entry.item.task_id)
        entry.owner, entry.lease = owner, lease

    def give_back(self, entry: Entry) -> None:
        lane = self.lanes[entry.lane]
        lane.leased.discard(entry.item.task_id)
        entry.owner = entry.lease = None
        insort(lane.waiting, entry.place)

    def promote(self, now: datetime) -> bool:
        """Delayed items whose time has come wait from now on. True if a lane is ready."""
        count = bisect_left(self.delayed, now, key=lambda row: row[0])
        while count < len(self.delayed) and self.delayed[count][0] == now:
            count += 1
        due = [self.entries[task_id] for _, task_id in self.delayed[:count]]
        del self.delayed[:count]
        for entry in due:
            entry.delayed = False
            insort(self.lanes[entry.lane].waiting, entry.place)
        return self.reopen((entry.lane for entry in due), now)

    def reopen(self, names: Iterable[str], now: datetime) -> bool:
        """Looks at the facts of these lanes again. True if one of them may be served now."""
        ready = False
        for name in dict.fromkeys(names):
            lane = self.lanes[name]
            if lane.ready is not None:
                _cut(self.ready, lane.ready)
                lane.ready = None
            if lane.waiting and not lane.leased and not self._locked(name, now):
                lane.ready = (lane.waiting[0][0], name)
                insort(self.ready, lane.ready)
                ready = True
            if not lane.waiting and not lane.leased:
                del self.lanes[name]
        return ready

    def expire_locks(self, now: datetime) -> list[str]:
        """Lays expired locks aside: their devices."""
        over = [device_id for device_id, lock in self.locks.items() if not lock.in_force(now)]
        for device_id in over:
            del self.locks[device_id]
        return over

    def _locked(self, name: str, now: datetime) -> bool:
        lock = self.locks.get(name)
        return lock is not None and lock.in_force(now) and is_id(lock.value)


def _cut(rows: list[tuple[str, str]] | list[tuple[datetime, str]], row: tuple[str, str] | tuple[datetime, str]) -> None:
    at = bisect_left(rows, row)
    if at < len(rows) and rows[at] == row:
        del rows[at]
