"""Queue and locks against a simple model: whatever is done in whatever order, exactly the right items are handed out."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scriptdispatch.domain.lanes import lane_of
from scriptdispatch.domain.model import Priority
from scriptdispatch.ids import derived_id, is_id, new_id
from scriptdispatch.queue.port import Leased
from tests.contract.queue_backends import ManualClock, Rig, claim, item, memory_rig, sqlite_rig

T = TypeVar("T")
DEVICES = ("a", "b", "c")
OWNERS = ("one", "two")
TYPES = ("script", "http")
# Which device each task is of never changes: two of each, and some without.
TASKS = {derived_id("01900000-0000", n): device for n, device in enumerate(("a", "b", "c", None) * 3)}
tasks = st.sampled_from(sorted(TASKS))
devices = st.sampled_from(DEVICES)
owners = st.sampled_from(OWNERS)


@dataclass(frozen=True)
class Held:
    value: str
    expires_at: datetime


@dataclass(frozen=True)
class Known:
    key: str
    due_at: datetime
    kind: str
    lease: str | None = None
    owner: str | None = None
    crashes: int = 0


class QueueMachine(RuleBasedStateMachine):
    make: Callable[[Path, ManualClock], Rig]

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.rig = type(self).make(self.folder, self.clock)
        self.run(self.rig.open())
        self.run(self.rig.locks.set_intact())
        self.known: dict[str, Known] = {}
        self.locks: dict[str, Held] = {}
        self.owned_until: dict[str, datetime] = {}
        self.handed_out: list[Leased] = []

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.run(self.rig.close())
            self.loop.close()
            shutil.rmtree(self.folder)

    def run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.loop.run_until_complete(awaited())

    # --- what may happen

    @rule(
        task=tasks, priority=st.sampled_from(("low", "normal", "high")), delay=st.sampled_from((0, 0, 3, 20)),
        kind=st.sampled_from(TYPES),
    )  # fmt: skip
    def push(self, task: str, priority: Priority, delay: float, kind: str) -> None:
        pushed = item(self.clock, TASKS[task], priority=priority, due_in=delay, kind=kind, task_id=task)
        self.run(self.rig.queue.push([pushed]))
        crashes = self.known[task].crashes if task in self.known else 0
        self.known[task] = Known(pushed.lane_key, pushed.due_at, kind, crashes=crashes)

    @rule(owner=owners, limit=st.integers(1, 4), types=st.sampled_from((None, None, ["http"], ["script", "http"])))
    def take(self, owner: str, limit: int, types: list[str] | None) -> None:
        expected = [task for task in self.heads() if types is None or self.known[task].kind in types][:limit]
        taken = self.run(self.rig.queue.take(owner, limit, wait_s=0, types=types))
        assert [leased.task_id for leased in taken] == expected
        for leased in taken:
            assert leased.crashes == self.known[leased.task_id].crashes
            self.known[leased.task_id] = replace(self.known[leased.task_id], lease=leased.lease, owner=owner)
        if taken:
            self.owned_until.setdefault(owner, self.clock.now() + timedelta(seconds=10))
        self.handed_out += taken

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        leased = data.draw(st.sampled_from(self.handed_out))
        self.run(self.rig.queue.finish([leased]))
        if self.holds(leased):
            del self.known[leased.task_id]

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data(), crashed=st.booleans())
    def give_back(self, data: Any, crashed: bool) -> None:
        leased = data.draw(st.sampled_from(self.handed_out))
        self.run(self.rig.queue.give_back([leased], crashed=crashed))
        if self.holds(leased):
            known = self.known[leased.task_id]
            self.known[leased.task_id] = replace(known, lease=None, owner=None, crashes=known.crashes + crashed)

    @rule(task=tasks)
    def remove(self, task: str) -> None:
        self.run(self.rig.queue.remove([task]))
        if task in self.known and self.known[task].lease is None:
            del self.known[task]

    @rule(device=devices, ttl_s=st.sampled_from((5, 100)))
    def acquire(self, device: str, ttl_s: float) -> None:
        asked = claim(device, ttl_s=ttl_s)
        (grant,) = self.run(self.rig.locks.acquire([asked]))
        assert grant.verdict == ("held" if device in self.locks else "granted")
        if grant.holder is not None:
            assert grant.holder.value == self.locks[device].value
        else:
            self.locks[device] = Held(asked.execution_id, self.clock.now() + timedelta(seconds=ttl_s))

    @rule(device=devices, ours=st.booleans())
    def restore(self, device: str, ours: bool) -> None:
        asked = claim(device, new_id() if ours else "somebody else")
        assert self.run(self.rig.locks.restore([asked])) == [device not in self.locks]
        self.locks.setdefault(device, Held(asked.execution_id, self.clock.now() + timedelta(seconds=60)))

    @rule(device=devices, right=st.booleans())
    def release(self, device: str, right: bool) -> None:
        value = self.locks[device].value if right and device in self.locks else new_id()
        freed = self.run(self.rig.locks.release([(device, value)]))
        assert freed == [right and device in self.locks]
        if freed[0]:
            del self.locks[device]

    @rule(owner=owners)
    def renew(self, owner: str) -> None:
        self.run(self.rig.queue.renew(owner, 15))
        self.owned_until[owner] = self.clock.now() + timedelta(seconds=15)

    @rule()
    def reclaim(self) -> None:
        now = self.clock.now()
        self.owned_until = {owner: until for owner, until in self.owned_until.items() if until > now}
        back = [task for task, known in self.known.items() if known.owner and known.owner not in self.owned_until]
        assert self.run(self.rig.queue.reclaim()) == len(back)
        for task in back:
            self.known[task] = replace(self.known[task], lease=None, owner=None)

    @rule(seconds=st.sampled_from((0.001, 1, 4, 30)))
    def time_passes(self, seconds: float) -> None:
        """A lock that expires is the one thing that nobody does: its lane has to be looked at."""
        self.clock.advance(seconds)
        over = [device for device, held in self.locks.items() if held.expires_at <= self.clock.now()]
        for device in over:
            del self.locks[device]
        self.run(self.rig.queue.reopen(over))

    # --- what must hold

    @invariant()
    def everything_is_where_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        queue, locks = self.rig.queue, self.rig.locks
        assert self.run(queue.entries(None, 100)) == sorted(self.known)
        places = self.run(queue.places(sorted(TASKS)))
        assert sorted(places) == sorted(self.known)
        for task, known in self.known.items():
            place = places[task]
            waits = known.lease is None and known.due_at <= self.clock.now()
            assert place.leased == (known.lease is not None)
            assert place.position == (self.lane(lane_of(task, TASKS[task])).index(task) + 1 if waits else None)
        lanes = {view.device_id: view.length for view in self.run(queue.lanes(None, 100))}
        assert lanes == {device: len(self.lane(device)) for device in DEVICES if self.lane(device)}
        assert {device: lock.value for device, lock in self.run(locks.holders(DEVICES)).items()} == {
            device: held.value for device, held in self.locks.items()
        }

    def lane(self, lane: str) -> list[str]:
        """What waits in it, in order."""
        waiting = [
            (known.key, task)
            for task, known in self.known.items()
            if lane_of(task, TASKS[task]) == lane and known.lease is None and known.due_at <= self.clock.now()
        ]
        return [task for _, task in sorted(waiting)]

    def heads(self) -> list[str]:
        """What may be handed out, in order: the head of each open lane."""
        lanes = {lane_of(task, TASKS[task]) for task in self.known}
        closed = {lane_of(task, TASKS[task]) for task, known in self.known.items() if known.lease is not None}
        closed |= {device for device, held in self.locks.items() if is_id(held.value)}
        heads = [self.lane(lane)[0] for lane in lanes - closed if self.lane(lane)]
        return sorted(heads, key=lambda task: self.known[task].key)

    def holds(self, leased: Leased) -> bool:
        known = self.known.get(leased.task_id)
        return known is not None and known.lease == leased.lease


class MemoryMachine(QueueMachine):
    make = staticmethod(memory_rig)


class SqliteMachine(QueueMachine):
    make = staticmethod(sqlite_rig)


TestMemoryQueueAgainstTheModel = MemoryMachine.TestCase
TestMemoryQueueAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSqliteQueueAgainstTheModel = SqliteMachine.TestCase
TestSqliteQueueAgainstTheModel.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
