"""What follows a closed execution row: the task (K2), the queue, the device's lock (K3), the announcement.

Used by whoever closed the row (worker, closer, timeout checker, user, recovery) and by whoever finds one half done. Every
step may be repeated by anybody to the same end, so a caller that dies in between is no harm.
"""

import random
from collections.abc import Callable, Container, Sequence
from datetime import timedelta

import msgspec

from scriptdispatch import crashpoints, logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import Applied, ChangeTask
from scriptdispatch.domain.model import EXECUTABLE, FINAL, Execution, Task
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.metrics import Metrics
from scriptdispatch.queue.port import Event, Item
from scriptdispatch.services.announcer import Announcer
from scriptdispatch.services.fields import format_time
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

TRIES = 8  # a lost compare-and-set is decided again; each time somebody else moved the task on
log = logs.get("closing")


class Closing:
    def __init__(
        self,
        backends: Backends,
        settings: Settings,
        *,
        role: str,
        metrics: Metrics | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._backends, self._role, self.chance = backends, role, chance
        self._horizon = timedelta(seconds=2 * settings.load_interval)
        self.announcer = Announcer(backends.events)
        self.metrics = metrics or Metrics()

    async def settle(self, rows: Sequence[Execution], *, term: int | None = None, just_closed: Container[str] = ()) -> None:
        """K2 and K3 for rows that are closed in the store (as read). Rows that are still open are left alone. `just_closed`:
        ids of rows whose K1 the caller has just won, so that what their tasks are like may be presumed."""
        closed = [row for row in rows if not row.active]
        if not closed:
            return
        moved = await self._settle_tasks(closed, term, just_closed)
        await crashpoints.reach(f"{self._role}.after_K2", closed[0].task_id)
        self.announce(moved)
        await self._release(closed)
        await crashpoints.reach(f"{self._role}.after_K3", closed[0].task_id)

    async def settle_ids(self, execution_ids: Sequence[str], *, term: int | None = None) -> list[Execution]:
        """The same from ids: reads the rows first. Answers them as read."""
        rows = [row for row in await self._backends.store.executions(execution_ids) if row is not None]
        await self.settle(rows, term=term)
        return rows

    async def _settle_tasks(
        self, rows: Sequence[Execution], term: int | None, just_closed: Container[str] = ()
    ) -> list[Task]:
        moved: list[Task] = []
        pending = {row.task_id: row for row in rows}
        if len(pending) < len(rows):  # several rows of one task: one after the other, oldest first
            for row in rows:
                moved += await self._settle_tasks([row], term)
            return moved
        for attempt in range(TRIES):
            decided = await self._decide(pending, just_closed if attempt == 0 else ())
            if not decided:
                return moved
            outcomes = await self._backends.store.commit([change for _, change in decided], term=term)
            won = [pair for pair, outcome in zip(decided, outcomes, strict=True) if outcome.won]
            moved += await self._after(won, pending)
            pending = {change.task_id: pending[change.task_id] for change in _lost(decided, outcomes)}
            if not pending:
                return moved
        log.warning("tasks kept changing while they were settled; the reconciler goes on", tasks=list(pending)[:5])
        return moved

    async def _decide(self, pending: dict[str, Execution], just_closed: Container[str]) -> list[tuple[Task, ChangeTask]]:
        now = self._backends.clock.now()
        usual = {id: lifecycle.settle_presumed(row, now) for id, row in pending.items() if row.id in just_closed}
        decided = [pair for pair in usual.values() if pair is not None]
        for task in await self._backends.store.tasks([id for id in pending if usual.get(id) is None]):
            if task is None:
                continue
            row = pending[task.id]
            change = lifecycle.settle(task, row, now, self.chance()) or lifecycle.settle_late(task, row, now)
            if change is not None:
                decided.append((task, change))
        return decided

    async def _after(self, won: Sequence[tuple[Task, ChangeTask]], rows: dict[str, Execution]) -> list[Task]:
        """Queue what is to run again; count what has ended."""
        moved = [applied(task, change) for task, change in won if "status" in change.set]
        for task in moved:
            row = rows[task.id]
            if task.status in FINAL:
                self.metrics.finish(task.type, task.status, task.error.code if task.error else None)
            if row.outcome != "handed_back":
                for phase, ms in (("wait", row.wait_ms), ("push", row.push_ms), ("run", row.run_ms)):
                    self.metrics.observe(phase, ms)
        await self.enqueue([task for task in moved if task.status in EXECUTABLE])
        return moved

    async def enqueue(self, tasks: Sequence[Task]) -> None:
        """Pushes those that fall due before the load after next. If the queue is away the loader does it later (R5)."""
        limit = self._backends.clock.now() + self._horizon
        items = [item_of(task) for task in tasks if task.next_run_at is not None and task.next_run_at <= limit]
        if not items:
            return
        try:
            await self._backends.queue.push(items)
        except QueueUnavailable as error:
            log.warning("not queued; the loader will", event_name="queue.away", error=str(error), tasks=len(items))

    async def _release(self, rows: Sequence[Execution]) -> None:
        held = [(row.device_id, row.id) for row in rows if row.device_id is not None]
        if not held:
            return
        try:
            fences = {row.device_id: row.fencing_token for row in rows if row.device_id and row.fencing_token}
            released = await self._backends.locks.release(held, fences=fences)
        except QueueUnavailable as error:
            log.warning("locks not released; the reconciler will", error=str(error), locks=len(held))
            return
        at = format_time(self._backends.clock.now())
        events: list[Event] = [
            {"event": "device.released", "device_id": device, "execution_id": execution, "at": at}
            for (device, execution), gone in zip(held, released, strict=True)
            if gone
        ]
        self.announcer.say(events)

    async def moved(self, tasks: Sequence[Task]) -> None:
        """For a task that was moved without an execution: queue it or count it, and say so."""
        for task in tasks:
            if task.status in FINAL:
                self.metrics.finish(task.type, task.status, task.error.code if task.error else None)
        await self.enqueue([task for task in tasks if task.status in EXECUTABLE])
        self.announce(tasks)

    def announce(self, tasks: Sequence[Task], others: Sequence[Event] = ()) -> None:
        self.announcer.say([*others, *(changed(task) for task in tasks)])


def item_of(task: Task) -> Item:
    assert task.next_run_at is not None
    return Item(task_id=task.id, device_id=task.device_id, lane_key=task.lane_key, due_at=task.next_run_at, type=task.type)


def applied(task: Task, change: ChangeTask) -> Task:
    """The task as it is after a change that was won."""
    return msgspec.structs.replace(task, **change.set)


def changed(task: Task) -> Event:
    return {
        "event": "task.changed",
        "task_id": task.id,
        "status": task.status,
        "device_id": task.device_id,
        "execution_id": task.execution_id,
        "progress": task.progress,
        "retry_count": task.retry_count,
        "at": format_time(task.updated_at),
    }


def _lost(decided: Sequence[tuple[Task, ChangeTask]], outcomes: Sequence[Applied]) -> list[ChangeTask]:
    return [change for (_, change), outcome in zip(decided, outcomes, strict=True) if not outcome.won]
