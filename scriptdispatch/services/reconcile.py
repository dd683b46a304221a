"""Queue, lanes and locks against the store: finds what was lost or left over and mends it (PROTOCOL R1–R5, T1, B).

The leader runs it in small steps; `POST /reconcile` runs all of it at once. The store is the truth: everything here can be
repeated by anybody at any time. Each step answers how many it mended.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from scriptdispatch import crashpoints, ids, logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution
from scriptdispatch.domain.model import UNDER_WAY, Error, Execution, Task
from scriptdispatch.locks.port import Claim, Lock
from scriptdispatch.services.closing import Closing, item_of
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

PAGE = 500
LOCK_GRACE = timedelta(seconds=crashpoints.grace_s(30))  # R1: a worker between W2 and W3 is faster than this
UNSENT_GRACE = timedelta(seconds=crashpoints.grace_s(60))  # R4
SETTLE_GRACE = timedelta(seconds=crashpoints.grace_s(30))  # R3: whoever closed a row has settled it by then
LATE = timedelta(seconds=15)  # R5: by then a task that was due when it was stored can be seen, however slow the store was
MOST_FOLLOWED = 300_000  # more than that: look at all of them again rather than remember them
LOCK_MARGIN_S = 300.0  # the lock's own expiry is only a garbage collector
log = logs.get("reconcile")


class Reconciler:
    def __init__(self, backends: Backends, settings: Settings, closing: Closing | None = None) -> None:
        self._backends, self._settings = backends, settings
        self._closing = closing or Closing(backends, settings, role="reconciler")
        self._followed: set[str] = set()  # rows of the last round of R3 whose tasks have followed

    async def run_all(self, term: int | None = None) -> dict[str, int]:
        """Everything, now, over all data."""
        return {
            "overdue_closed": await self.close_overdue(term),
            "unsent_handed_back": await self.hand_back_unsent(term),
            "tasks_settled": await self.settle_all(term),
            "locks_freed": await self.free_locks(),
            "locks_restored": await self.restore_locks(),
            "queue_entries_dropped": await self.drop_entries(),
            "leases_reclaimed": await self._backends.queue.reclaim(),
            "tasks_queued": await self.load(self._horizon()),
            "lanes_looked_at": await self.reopen_lanes(),
        }

    # --- R5 and the loader

    async def load(self, until: datetime, since: datetime | None = None) -> int:
        """Tasks due before `until` (from `since` on) that no queue has are pushed."""
        queued = 0
        after = (since, "") if since is not None else None
        while page := await self._backends.store.due_tasks(until, after, PAGE):
            queued += await self._push_missing([id for _, id in page])
            after = page[-1]
            if len(page) < PAGE:
                break
        return queued

    async def load_recent(self) -> int:
        """Every check: what fell due since the one before the last. All of it is looked at every half minute."""
        now = self._backends.clock.now()
        return await self.load(now, since=now - LATE - 2 * timedelta(seconds=self._settings.check_interval))

    def _horizon(self) -> datetime:
        """Due before the load after next."""
        return self._backends.clock.now() + timedelta(seconds=2 * self._settings.load_interval)

    async def load_ahead(self) -> int:
        return await self.load(self._horizon())

    async def _push_missing(self, due: Sequence[str]) -> int:
        known = await self._backends.queue.known(due)
        found = await self._backends.store.tasks([id for id in due if id not in known])
        missing = [task for task in found if task is not None and _may_run(task)]
        if not missing:
            return 0
        await self._backends.queue.push([item_of(task) for task in missing])
        unmarked = [lifecycle.mark_queued(task) for task in missing if not task.queued]
        if unmarked:
            await self._backends.store.commit(unmarked)
        return len(missing)

    async def drop_entries(self) -> int:
        """Queue entries whose task is gone or over."""
        dropped, after = 0, None
        while page := await self._backends.queue.entries(after, PAGE):
            statuses = await self._backends.store.statuses(page)
            over = [id for id in page if id not in statuses or lifecycle.is_final(statuses[id])]
            if over:
                await self._backends.queue.remove(over)
                dropped += len(over)
            after = page[-1]
            if len(page) < PAGE:
                break
        return dropped

    async def reopen_lanes(self) -> int:
        """A lock that expired by itself opened no lane: look at all of them again."""
        looked, after = 0, None
        while page := await self._backends.queue.lanes(after, PAGE):
            await self._backends.queue.reopen([lane.device_id for lane in page])
            looked += len(page)
            after = page[-1].device_id
            if len(page) < PAGE:
                break
        return looked

    # --- R1, R2, B

    async def free_locks(self) -> int:
        """R1. The lock is read first, then its row: a lock of ours is free to go if the row is closed, or if there is
        none and its worker must have got to W3 long ago. What is not ours is left alone."""
        freed, after = 0, None
        while page := await self._backends.locks.all(after, PAGE):
            ours = [lock for lock in page if ids.is_id(lock.value)]
            rows = await self._backends.store.executions([lock.value for lock in ours])
            for lock, row in zip(ours, rows, strict=True):
                if self._left_over(lock, row):
                    freed += await self._backends.locks.force(lock.device_id, lock.value)
            after = page[-1].device_id
            if len(page) < PAGE:
                break
        return freed

    def _left_over(self, lock: Lock, row: Execution | None) -> bool:
        if row is not None:
            return not row.active
        return lock.since is None or self._backends.clock.now() - lock.since > LOCK_GRACE

    async def restore_locks(self) -> int:
        """R2: an open execution of a device holds its lock."""
        restored, after = 0, None
        while page := await self._backends.store.open_executions(after=after, limit=PAGE):
            claims = [self.claim_of(row) for row in page if row.device_id is not None]
            restored += await self._restore(claims) if claims else 0
            after = page[-1].id
            if len(page) < PAGE:
                break
        return restored

    async def _restore(self, claims: Sequence[Claim]) -> int:
        """A row that was closed after it was read has had its K3, perhaps just before the lock was set: read again, or
        its device would stand still until R1."""
        outcomes = await self._backends.locks.restore(claims)
        done = [claim for claim, was_set in zip(claims, outcomes, strict=True) if was_set]
        rows = await self._backends.store.executions([claim.execution_id for claim in done])
        closed = [(row.device_id, row.id) for row in rows if row is not None and row.device_id and not row.active]
        if closed:
            await self._backends.locks.release(closed)
        return len(done) - len(closed)

    def claim_of(self, row: Execution) -> Claim:
        assert row.device_id is not None
        ttl_s = row.timeout_seconds + self._settings.timeout_grace + LOCK_MARGIN_S
        return Claim(device_id=row.device_id, execution_id=row.id, task_id=row.task_id, ttl_s=ttl_s)

    async def rebuild(self) -> bool:
        """B1, B2: the lock service has lost its memory. Locks and lanes come back from the store, then it may grant."""
        if await self._backends.locks.intact():
            return False
        locks, tasks = await self.restore_locks(), await self.load(self._horizon())
        await self._backends.locks.set_intact()
        log.info("lock service rebuilt", locks=locks, tasks_queued=tasks)
        return True

    # --- R3, R4, T1

    async def settle_recent(self, term: int | None = None) -> int:
        """R3: rows closed a moment ago whose task or lock may not have followed. One that has is not looked at again in
        later rounds; one that was never stamped is, for its task may still be started by a late W4."""
        now = self._backends.clock.now()
        until, after, settled = now - SETTLE_GRACE, (now - timedelta(seconds=120), ""), 0
        seen: set[str] = set()
        while page := await self._backends.store.closed_executions(after, until, PAGE):
            rows = await self._backends.store.executions([id for _, id in page if id not in self._followed])
            there = [row for row in rows if row is not None]
            behind = await self._settle_unsettled(there, term)
            settled += len(behind)
            again = {row.id for row in there if row.sending_at is None} | {row.id for row in behind}
            seen.update(id for _, id in page if id not in again)
            after = page[-1]
            if len(page) < PAGE:
                break
        self._followed = seen if len(seen) <= MOST_FOLLOWED else set()
        return settled

    async def settle_all(self, term: int | None = None) -> int:
        """R3 over all tasks under way: when a leader starts, and hourly."""
        settled, after = 0, None
        while page := await self._backends.store.tasks_under_way(after, PAGE):
            rows = await self._backends.store.executions([task.execution_id for task in page if task.execution_id])
            closed = [row for row in rows if row is not None and not row.active]
            await self._closing.settle(closed, term=term)
            settled += len(closed)
            after = page[-1].id
            if len(page) < PAGE:
                break
        return settled

    async def _settle_unsettled(self, rows: Sequence[Execution], term: int | None) -> list[Execution]:
        """Answers those that were behind."""
        tasks = await self._backends.store.tasks([row.task_id for row in rows])
        behind = [
            row
            for row, task in zip(rows, tasks, strict=True)
            if task is not None and task.execution_id == row.id and task.status in UNDER_WAY
        ]
        await self._closing.settle(behind, term=term)
        return behind

    async def hand_back_unsent(self, term: int | None = None) -> int:
        """R4: rows open and unstamped for a minute, whoever owns them. A live worker loses W5 and sends nothing."""
        before = self._backends.clock.now() - UNSENT_GRACE
        rows = await self._backends.store.open_executions(unstamped_before=before, limit=PAGE)
        return await self.hand_back(rows, "nobody sent it for a minute", term)

    async def hand_back(self, rows: Sequence[Execution], why: str, term: int | None = None) -> int:
        """M1 without a verdict on the task."""
        if not rows:
            return 0
        now = self._backends.clock.now()
        error = Error(code="SYSTEM_ERROR", message=why)
        changes = [
            lifecycle.close_unsent(row, "handed_back", now, closed_by="reconciler", reason=why, error=error) for row in rows
        ]
        outcomes = await self._backends.store.commit(changes, term=term)
        await self._closing.settle_ids([row.id for row in rows], term=term)
        return sum(outcome.won for outcome in outcomes)

    async def close_overdue(self, term: int | None = None) -> int:
        """T1–T3. Answers the count; `overdue` (below) also says which, for T4."""
        return len(await self.overdue(term))

    async def overdue(self, term: int | None = None) -> list[Execution]:
        """T1–T3: rows past their deadline, whatever their task's status; not while their push may be under way."""
        now = self._backends.clock.now()
        rows = await self._backends.store.overdue_executions(now, PAGE)
        late = [row for row in rows if not lifecycle.being_pushed(row, now)]
        if not late:
            return []
        await crashpoints.reach("leader.before_T1", late[0].task_id)
        changes = [self._timeout(row, now) for row in late]
        outcomes = await self._backends.store.commit(changes, term=term)
        closed = [row for row, outcome in zip(late, outcomes, strict=True) if outcome.won]
        await self._closing.settle_ids([row.id for row in late], term=term)
        if closed:
            log.warning("executions timed out", executions=len(closed), first=closed[0].id)
        return closed

    def _timeout(self, row: Execution, now: datetime) -> ChangeExecution:
        unclear = " The push was unclear." if row.push == "unknown" else ""
        why = f"no result within {row.timeout_seconds} s and {self._settings.timeout_grace:g} s of grace.{unclear}"
        error = Error(code="TIMEOUT", message=why, details={"push": row.push})
        return lifecycle.give_up(row, "timeout", now, closed_by="timeout-checker", reason=why, error=error)

    async def cancels_unanswered(self) -> list[Task]:
        """U3: central control is asked until it answers."""
        tasks = await self._backends.store.cancels_to_ask(PAGE)
        return [task for task in tasks if task.cancel_answer is None and task.execution_id is not None]


def _may_run(task: Task) -> bool:
    return lifecycle.is_executable(task.status) and task.next_run_at is not None
