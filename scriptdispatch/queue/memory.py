"""The ready queue and the event bus in one process: for tests and simulation, and lost with it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta

from scriptdispatch.clock import Clock
from scriptdispatch.domain.lanes import lane_of, priority_of
from scriptdispatch.domain.model import PRIORITIES
from scriptdispatch.ids import new_id
from scriptdispatch.queue.fanout import Fanout
from scriptdispatch.queue.memory_lanes import Entry, Lanes
from scriptdispatch.queue.port import Event, Item, LaneView, Leased, Place
from scriptdispatch.sleepers import Sleepers, sleep_until_rung

FIRST_LEASE_S = 10.0  # for an owner that takes before it has ever renewed


class MemoryQueue:
    """`lanes` is shared with MemoryLocks, as both live in one place."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._owners: dict[str, datetime] = {}  # how long their leases hold
        self._sleepers = Sleepers()
        self.lanes_and_locks = Lanes()

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def ping(self) -> str:
        return "memory"

    async def push(self, items: Sequence[Item]) -> None:
        now = self._clock.now()
        lanes = self.lanes_and_locks
        before = lanes.delayed[0][0] if lanes.delayed else None
        for item in items:
            lanes.put(item, now)
        self.look_again([lane_of(item.task_id, item.device_id) for item in items])
        if lanes.delayed and (before is None or lanes.delayed[0][0] < before):
            self._sleepers.wake()

    async def take(self, owner: str, limit: int, *, wait_s: float, types: Sequence[str] | None = None) -> list[Leased]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        with self._sleepers.alarm() as alarm:
            while limit > 0:
                alarm.clear()
                if leased := self._lease(owner, limit, types):
                    return leased
                left = until - loop.time()
                if left <= 0:
                    return []
                await sleep_until_rung(alarm, min(left, self._until_next_due(left)))
        return []

    async def renew(self, owner: str, ttl_s: float) -> None:
        self._owners[owner] = self._clock.now() + timedelta(seconds=ttl_s)

    async def reclaim(self) -> int:
        """Also lays expired locks aside and looks at their lanes again."""
        now = self._clock.now()
        self._owners = {owner: until for owner, until in self._owners.items() if until > now}
        lanes = self.lanes_and_locks
        orphans = [entry for entry in lanes.entries.values() if entry.owner is not None and entry.owner not in self._owners]
        for entry in orphans:
            lanes.give_back(entry)
        self.look_again([*(entry.lane for entry in orphans), *lanes.expire_locks(now)])
        return len(orphans)

    async def finish(self, leased: Sequence[Leased]) -> None:
        for item in leased:
            if entry := self._under(item):
                self.lanes_and_locks.drop(entry)
        self.look_again([lane_of(item.task_id, item.device_id) for item in leased])

    async def give_back(self, leased: Sequence[Leased], *, crashed: bool = False) -> None:
        for item in leased:
            if entry := self._under(item):
                entry.crashes += crashed
                self.lanes_and_locks.give_back(entry)
        self.look_again([lane_of(item.task_id, item.device_id) for item in leased])

    async def reopen(self, device_ids: Sequence[str]) -> None:
        self.look_again(device_ids)

    async def remove(self, task_ids: Sequence[str]) -> None:
        found = [self.lanes_and_locks.entries.get(task_id) for task_id in task_ids]
        gone = [entry for entry in found if entry is not None and entry.lease is None]
        for entry in gone:
            self.lanes_and_locks.drop(entry)
        self.look_again([entry.lane for entry in gone])

    async def known(self, task_ids: Sequence[str]) -> set[str]:
        return {task_id for task_id in task_ids if task_id in self.lanes_and_locks.entries}

    async def places(self, task_ids: Sequence[str]) -> dict[str, Place]:
        self._promote()
        found = [self.lanes_and_locks.entries.get(task_id) for task_id in task_ids]
        return {entry.item.task_id: self._place(entry) for entry in found if entry is not None}

    async def lane(self, device_id: str, limit: int) -> list[str]:
        self._promote()
        lane = self.lanes_and_locks.lanes.get(device_id)
        return [task_id for _, task_id in lane.waiting[:limit]] if lane else []

    async def lanes(self, after: str | None, limit: int) -> list[LaneView]:
        self._promote()
        names = sorted(
            name
            for name, lane in self.lanes_and_locks.lanes.items()
            if lane.waiting and not name.startswith("~") and name > (after or "")
        )
        lanes = self.lanes_and_locks.lanes
        return [LaneView(device_id=name, length=len(lanes[name].waiting)) for name in names[:limit]]

    async def ready(self) -> dict[str, int]:
        self._promote()
        counts = Counter(
            priority_of(entry.item.lane_key)
            for entry in self.lanes_and_locks.entries.values()
            if entry.lease is None and not entry.delayed
        )
        return {priority: counts[priority] for priority in PRIORITIES}

    async def entries(self, after: str | None, limit: int) -> list[str]:
        return sorted(task_id for task_id in self.lanes_and_locks.entries if task_id > (after or ""))[:limit]

    # --- inside, and for the locks

    def look_again(self, lanes: Sequence[str]) -> None:
        """Facts of these lanes have changed; whoever sleeps is woken if one may be served."""
        if self.lanes_and_locks.reopen(lanes, self._clock.now()):
            self._sleepers.wake()

    def _lease(self, owner: str, limit: int, types: Sequence[str] | None) -> list[Leased]:
        self._promote()
        lanes, lease = self.lanes_and_locks, new_id()
        leased: list[Leased] = []
        for _, name in list(lanes.ready):
            if len(leased) == limit:
                break
            entry = lanes.entries[lanes.lanes[name].waiting[0][1]]
            if types is None or entry.item.type in types:
                lanes.lease(entry, owner, lease)
                lanes.reopen((name,), self._clock.now())
                leased.append(_leased(entry, lease))
        if leased:
            self._owners.setdefault(owner, self._clock.now() + timedelta(seconds=FIRST_LEASE_S))
        return leased

    def _promote(self) -> None:
        if self.lanes_and_locks.promote(self._clock.now()):
            self._sleepers.wake()

    def _until_next_due(self, otherwise: float) -> float:
        delayed = self.lanes_and_locks.delayed
        return (delayed[0][0] - self._clock.now()).total_seconds() if delayed else otherwise

    def _under(self, item: Leased) -> Entry | None:
        entry = self.lanes_and_locks.entries.get(item.task_id)
        return entry if entry is not None and entry.lease == item.lease else None

    def _place(self, entry: Entry) -> Place:
        leased = entry.lease is not None
        position = None
        if not leased and not entry.delayed:
            position = self.lanes_and_locks.lanes[entry.lane].waiting.index(entry.place) + 1
        return Place(task_id=entry.item.task_id, position=position, leased=leased, due=not entry.delayed)


def _leased(entry: Entry, lease: str) -> Leased:
    item = entry.item
    return Leased(
        task_id=item.task_id,
        device_id=item.device_id,
        lane_key=item.lane_key,
        type=item.type,
        lease=lease,
        crashes=entry.crashes,
    )


class MemoryEvents:
    def __init__(self) -> None:
        self._fanout = Fanout()

    async def publish(self, events: Sequence[Event]) -> None:
        self._fanout.put(events)

    def listen(self) -> AsyncIterator[Event]:
        return self._fanout.listen()
