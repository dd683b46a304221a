"""What becomes of the executions of a worker or node that died: by phase, never by guess (PROTOCOL M1, M2).

No execution: untouched, delivered again. Certainly not pushed: handed back at no cost, the third time in a row it is
poison. Perhaps pushed: `send_success` with `push: unknown`; row and lock stay until result or deadline. All of it walks
rows and may be repeated: a zombie may still insert one.
"""

from collections.abc import Callable, Sequence

from scriptdispatch import ids, logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution
from scriptdispatch.domain.model import UNDER_WAY, Error, Execution
from scriptdispatch.queue.port import Leased
from scriptdispatch.services.closing import Closing, applied
from scriptdispatch.wiring import Backends

PAGE = 500
TakeOver = Callable[[Sequence[str]], None]
log = logs.get("recovery")


class Rescuer:
    """`take_over` gets the executions to be posted again (M3); None unless central control deduplicates."""

    def __init__(self, backends: Backends, closing: Closing, take_over: TakeOver | None = None) -> None:
        self._backends, self._closing, self._take_over = backends, closing, take_over

    async def worker_died(self, worker_id: str, items: Sequence[Leased], why: str) -> None:
        """M for a worker that is dead and reaped, then its items. Given back first where nothing was sent: the count of
        crashes must be on the item before M1 queues it again."""
        rows = await self._open_rows([worker_id])
        sent = {row.task_id for row in rows if row.sending_at is not None}
        await self._backends.queue.give_back([item for item in items if item.task_id not in sent], crashed=True)
        await self.recover(rows, why)
        await self._backends.queue.finish([item for item in items if item.task_id in sent])
        if items:
            await self._finish_half_done(items)
        if rows or items:
            log.warning(
                "work of a dead worker recovered",
                event_name="worker.recovered",
                worker_id=worker_id,
                unsent=len(rows) - len(sent),
                unknown=sum(row.sending_at is not None and row.push != "sent" for row in rows),
                items=len(items),
            )

    async def _finish_half_done(self, items: Sequence[Leased]) -> None:
        """R3 and R1 at once, for the tasks that it had in hand: it died between W2 and W3 (a lock without a row, which
        never comes), or between K1 and K3 (the row is closed, task or lock have not followed). If the lock is after all
        that of another worker which was given the same task, W3 decides as if R1 had freed it."""
        tasks = await self._backends.store.tasks([item.task_id for item in items])
        under_way = [task for task in tasks if task is not None and task.status in UNDER_WAY]
        await self._closing.settle_ids([task.execution_id for task in under_way if task.execution_id])
        devices = {item.device_id: item.task_id for item in items if item.device_id is not None}
        holders = await self._backends.locks.holders(list(devices))
        locks = [lock for device, lock in holders.items() if lock.task_id == devices[device] and ids.is_id(lock.value)]
        rows = await self._backends.store.executions([lock.value for lock in locks])
        for lock, row in zip(locks, rows, strict=True):
            if row is None or not row.active:
                await self._backends.locks.force(lock.device_id, lock.value)

    async def workers_died(self, worker_ids: Sequence[str], why: str, term: int | None = None) -> int:
        """M for workers of a dead node. Its items come back when its lease runs out."""
        rows = await self._open_rows(worker_ids)
        await self.recover(rows, why, term)
        return len(rows)

    async def recover(self, rows: Sequence[Execution], why: str, term: int | None = None) -> None:
        unsent = [row for row in rows if row.sending_at is None]
        if unsent:
            await self._hand_back(unsent, why, term)
        stamped = [row for row in rows if row.sending_at is not None]
        if stamped:
            await self._mark_unknown(stamped, why, term)

    async def _open_rows(self, worker_ids: Sequence[str]) -> list[Execution]:
        rows: list[Execution] = []
        after = None
        while page := await self._backends.store.open_executions(worker_ids=worker_ids, after=after, limit=PAGE):
            rows += page
            after = page[-1].id
            if len(page) < PAGE:
                break
        return rows

    async def _hand_back(self, rows: Sequence[Execution], why: str, term: int | None) -> None:
        """M1."""
        changes = [await self._verdict(row, why) for row in rows]
        await self._backends.store.commit(changes, term=term)
        await self._closing.settle_ids([row.id for row in rows], term=term)

    async def _verdict(self, row: Execution, why: str) -> ChangeExecution:
        now = self._backends.clock.now()
        if await self._hand_backs_in_a_row(row) + 1 >= lifecycle.POISON_LIMIT:
            error = lifecycle.poison_error()
            return lifecycle.close_unsent(
                row, "refused", now, closed_by="recovery", reason=error.message, error=error, retryable=False
            )
        error = Error(code="SYSTEM_ERROR", message=why)
        return lifecycle.close_unsent(row, "handed_back", now, closed_by="recovery", reason=why, error=error)

    async def _hand_backs_in_a_row(self, row: Execution) -> int:
        """Counted over the task's rows: those before this one that a dead worker left behind."""
        earlier = [other for other in await self._backends.store.executions_of(row.task_id) if other.attempt < row.attempt]
        count = 0
        for other in reversed(earlier):
            if other.outcome != "handed_back" or other.closed_by != "recovery":
                break
            count += 1
        return count

    async def _mark_unknown(self, rows: Sequence[Execution], why: str, term: int | None) -> None:
        """M2. Loses to a W7 that was faster, and to a result."""
        now = self._backends.clock.now()
        reason = f"push unclear: {why}"
        tasks = await self._backends.store.tasks([row.task_id for row in rows])
        read = [(task, row) for task, row in zip(tasks, rows, strict=True) if task is not None]
        changes = [lifecycle.sent(task, row, "unknown", now, reason, "recovery") for task, row in read]
        outcomes = await self._backends.store.commit(changes, term=term)
        if self._take_over is not None:
            # Once: after a take-over the stamp is a living worker's.
            self._take_over([row.id for row in rows if row.push != "sent" and row.sent_by == row.worker_id])
        won = zip(read, changes, outcomes, strict=True)
        self._closing.announce([applied(task, change) for (task, _), change, outcome in won if outcome.won])

    async def poison(self, item: Leased) -> None:
        """It kills its workers before it has an execution: failed, and out of the queue."""
        [task] = await self._backends.store.tasks([item.task_id])
        if task is not None and lifecycle.is_executable(task.status):
            change = lifecycle.poison(task, self._backends.clock.now(), "recovery")
            [outcome] = await self._backends.store.commit([change])
            if outcome.won:
                log.error("poison task failed", event_name="task.poison", task_id=task.id)
                await self._closing.moved([applied(task, change)])
        await self._backends.queue.finish([item])
