"""The way of one task through a worker: W1 to W9 of PROTOCOL.md, one method a step, every outcome a value.

The order is the guarantee. Before the stamp (W5) the execution is provably unsent and may be undone; from the stamp on
only a proof or the deadline ends it. Whatever happens the worker reports the item and goes on: no exception ends it.
"""

import asyncio
import traceback
from collections.abc import Coroutine
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeVar

import msgspec

from scriptdispatch import crashpoints, ids, logs
from scriptdispatch.central.breaker import Breaker
from scriptdispatch.central.client import CentralControl, PushFailed, PushRequest
from scriptdispatch.central.http import Connection
from scriptdispatch.central.outcomes import PushAnswer
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import Applied, ChangeExecution, InsertExecution
from scriptdispatch.domain.model import Error, Execution, Outcome, Push, Task
from scriptdispatch.errors import StoreUnavailable, Unavailable
from scriptdispatch.locks.port import Claim, Grant
from scriptdispatch.queue.port import Leased
from scriptdispatch.services.closing import Closing, applied, item_of
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.hearsay import heard
from scriptdispatch.services.reconcile import LOCK_MARGIN_S
from scriptdispatch.services.scripts import Scripts
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends
from scriptdispatch.worker.prepare import Prepared, Preparer, request_of

BREAKER_WAIT = timedelta(seconds=5)
RECORD_TRIES_S = 60.0  # W7: the script is out there, so its record is worth waiting for
REPOSTS = 3  # only with `central_deduplicates`
T = TypeVar("T")
log = logs.get("worker")


class Verdict(Enum):
    FINISHED = "finished"
    GIVE_BACK = "give back"  # to its lane, place kept
    WAIT = "wait"  # the same, and something is away: hand out nothing for a second


class Runner:
    def __init__(
        self,
        backends: Backends,
        settings: Settings,
        central: CentralControl,
        breaker: Breaker,
        closing: Closing,
        worker_id: str,
        node_id: str,
    ) -> None:
        self._backends, self._settings, self._central = backends, settings, central
        self._breaker, self._closing = breaker, closing
        self._worker_id, self._node_id = worker_id, node_id
        self._preparer = Preparer(Scripts(backends.store))
        self.hurry = False  # set when the process ends soon: what is not stamped is undone

    async def carry_out(self, item: Leased) -> Verdict:
        """W1 to W8 for one item."""
        await crashpoints.reach("worker.after_W1", item.task_id)
        if self.hurry or self._breaker.open:
            return Verdict.GIVE_BACK
        try:
            return await self._acquire(item, ids.new_id())
        except Unavailable as error:
            # Nothing is half done that redelivery, R1 or R4 would not mend.
            log.warning("put off", event_name="task.put_off", task_id=item.task_id, reason=str(error))
            return Verdict.WAIT
        except Exception as error:
            return await self._internal_error(item, error)

    # --- W2

    async def _acquire(self, item: Leased, execution_id: str) -> Verdict:
        """W2. The id is chosen before, so that a repeated call gets the same answer. The task is read beside the lock, not
        after it, or not at all if the queue's entry is fresh and tells it: W4 compares what it says."""
        task = heard(item.told, self._backends.clock.now())
        if item.device_id is None:
            return await self._look(item, execution_id, task or await self._read(item))
        claim = self._claim(item, execution_id, task.timeout_seconds if task else None)
        locking = _begin(self._lock(claim))  # first on its way
        reading = _begin(self._read(item)) if task is None else None
        try:
            if item.free:
                task = await reading if reading else task
                if task is not None and _is_due(task, self._backends.clock.now()):
                    return await self._insert_beside(item, task, claim, locking)
            grant = await locking
            if grant.verdict != "granted":
                return await self._not_granted(item, grant)
            return await self._look(item, execution_id, await reading if reading else task, grant.fence, claim)
        finally:
            if reading is not None:
                reading.cancel()

    async def _lock(self, claim: Claim) -> Grant:
        [grant] = await self._backends.locks.acquire([claim])
        await crashpoints.reach("worker.after_W2", claim.task_id)
        return grant

    async def _insert_beside(self, item: Leased, task: Task, claim: Claim, locking: asyncio.Task[Grant]) -> Verdict:
        """Nobody had the lock when the task was handed out, so W3 need not wait for W2's answer. W4 does: without the lock
        the row is handed back."""
        prepared = await self._preparer.prepare(task)
        row = self._snapshot(task, claim.execution_id, prepared, self._backends.clock.now())
        [outcome] = await self._backends.store.commit([InsertExecution(execution=row, fence_hint=item.fence)])
        await crashpoints.reach("worker.after_W3", task.id)
        try:
            grant = await locking
            if grant.verdict == "granted":
                await self._hold_longer(claim, task)
        except Unavailable:
            if outcome.won:
                await self._undo(row, "the lock service is away")
            raise
        if grant.verdict == "granted":
            return await self._inserted(item, task, row, outcome, prepared)
        if outcome.won:
            await self._undo(row, "somebody else has the device's lock")
        return await self._not_granted(item, grant)

    async def _not_granted(self, item: Leased, grant: Grant) -> Verdict:
        if grant.verdict == "rebuilding":
            return Verdict.WAIT
        assert grant.holder is not None
        if ids.is_id(grant.holder.value):
            return Verdict.GIVE_BACK  # busy at no cost; K3 of the holder opens the lane
        return await self._foreign_lock(item, grant.holder.value)

    def _claim(self, item: Leased, execution_id: str, timeout_s: float | None = None) -> Claim:
        assert item.device_id is not None
        ttl_s = self._hold_s(timeout_s or self._settings.execution_timeout)
        return Claim(device_id=item.device_id, execution_id=execution_id, task_id=item.task_id, ttl_s=ttl_s)

    def _hold_s(self, timeout_s: float) -> float:
        return timeout_s + self._settings.timeout_grace + LOCK_MARGIN_S

    async def _hold_longer(self, claim: Claim, task: Task) -> None:
        """The lock was asked for before anybody knew how long the script may run."""
        if (ttl_s := self._hold_s(task.timeout_seconds)) > claim.ttl_s:
            await self._backends.locks.acquire([msgspec.structs.replace(claim, ttl_s=ttl_s)])

    async def _foreign_lock(self, item: Leased, holder: str) -> Verdict:
        """The lock is a person's or another system's: DEVICE_BUSY, which costs a retry."""
        [task] = await self._backends.store.tasks([item.task_id])
        if task is None or not lifecycle.is_executable(task.status):
            return Verdict.FINISHED
        now, chance = self._backends.clock.now(), self._closing.chance()
        change = lifecycle.foreign_lock(task, holder, self._worker_id, now, chance)
        [outcome] = await self._backends.store.commit([change])
        if outcome.won:
            moved = applied(task, change)
            await self._closing.moved([moved])
        return Verdict.FINISHED

    async def _read(self, item: Leased) -> Task | None:
        [task] = await self._backends.store.tasks([item.task_id])
        return task

    async def _look(
        self, item: Leased, execution_id: str, task: Task | None, fence: int | None = None, claim: Claim | None = None
    ) -> Verdict:
        """Is it to be carried out? "No" counts only if it was read under the lock."""
        if item.device_id is not None and not _is_due(task, self._backends.clock.now()):
            task = await self._read(item)
        if task is None or not lifecycle.is_executable(task.status):
            if task is None:
                log.warning("not in the store; dropped", event_name="task.gone", task_id=item.task_id)
            await self._release(item.device_id, execution_id)
            return Verdict.FINISHED
        now = self._backends.clock.now()
        if not _is_due(task, now):
            await self._release(item.device_id, execution_id)
            await self._backends.queue.push([item_of(task)])  # too early: an older entry of it
            return Verdict.FINISHED
        prepared = await self._preparer.prepare(task)
        row = self._snapshot(task, execution_id, prepared, now)
        if claim is not None:
            await self._hold_longer(claim, task)
        return await self._insert(item, task, InsertExecution(execution=row, fence_hint=fence), prepared)

    def _snapshot(self, task: Task, execution_id: str, prepared: Prepared, now: datetime) -> Execution:
        due = task.next_run_at or task.created_at
        return Execution(
            id=execution_id,
            task_id=task.id,
            round=task.round,
            device_id=task.device_id,
            script_id=task.script_id,
            script_sha256=prepared.sha256,
            params=task.params,
            timeout_seconds=task.timeout_seconds,
            worker_id=self._worker_id,
            node_id=self._node_id,
            from_status=task.status,
            previous_execution_id=task.execution_id,
            previous_push=task.push,
            created_at=now,
            wait_ms=max(0, int((now - due).total_seconds() * 1000)),
        )

    # --- W3, W4

    async def _insert(self, item: Leased, task: Task, insert: InsertExecution, prepared: Prepared) -> Verdict:
        """W3: fence and attempt are given by the store; the device's open execution, if there is one, wins."""
        [outcome] = await self._backends.store.commit([insert])
        await crashpoints.reach("worker.after_W3", task.id)
        return await self._inserted(item, task, insert.execution, outcome, prepared)

    async def _inserted(self, item: Leased, task: Task, row: Execution, outcome: Applied, prepared: Prepared) -> Verdict:
        """With the lock in hand."""
        if not outcome.won:
            self._closing.metrics.counts["locks_lost_total"] += 1  # the lock was ours, and the device was not free
            await self._release(task.device_id, row.id)
            await self._restore_lock(outcome.holder)
            return Verdict.GIVE_BACK
        row = msgspec.structs.replace(row, attempt=outcome.attempt, fencing_token=outcome.fencing_token)
        try:
            return await self._start(item, task, row, prepared)
        except Unavailable:
            raise
        except Exception as error:
            return await self._refuse_row(row, _bug(error))

    async def _restore_lock(self, holder: str | None) -> None:
        """R2 by whoever met the device's open execution behind a lock that was lost: without it the item would go round
        and round until the reconciler comes. Read again after it: the row's own K3 may have come just before."""
        [row] = await self._backends.store.executions([holder]) if holder else [None]
        if row is None or not row.active or row.device_id is None:
            return
        ttl_s = row.timeout_seconds + self._settings.timeout_grace + LOCK_MARGIN_S
        claim = Claim(device_id=row.device_id, execution_id=row.id, task_id=row.task_id, ttl_s=ttl_s)
        await self._backends.locks.restore([claim])
        [row] = await self._backends.store.executions([row.id])
        if row is not None and not row.active:
            await self._release(row.device_id, row.id)

    async def _start(self, item: Leased, task: Task, row: Execution, prepared: Prepared) -> Verdict:
        """W4."""
        change = lifecycle.start(task, row, self._backends.clock.now())
        [outcome] = await self._backends.store.commit([change])
        await crashpoints.reach("worker.after_W4", task.id)
        if not outcome.won:
            await self._undo(row, "somebody else moved the task on")
            return Verdict.FINISHED
        started = applied(task, change)
        await self._announce(started, row)
        if prepared.error is not None:
            return await self._refuse_row(row, prepared.error)
        return await self._connect(started, row, prepared)

    # --- W5, W6

    async def _connect(self, task: Task, row: Execution, prepared: Prepared) -> Verdict:
        """The connection is in hand before the stamp: nothing slow between W5 and W6."""
        request = request_of(task, row, prepared)
        try:
            connection = await self._central.checkout()
        except PushFailed as failed:
            self._breaker.note(failed.answer)
            return await self._not_taken(row, failed.answer, stamped=False)
        try:
            if self.hurry:
                await self._undo(row, "its worker is stopping")
                return Verdict.GIVE_BACK
            return await self._stamp(task, row, connection, request)
        finally:
            connection.release()

    async def _stamp(self, task: Task, row: Execution, connection: Connection, request: PushRequest) -> Verdict:
        """W5, the point of no return."""
        await crashpoints.reach("worker.before_W5", row.task_id)
        stamped_at = self._backends.clock.uptime()
        now = self._backends.clock.now()
        change = lifecycle.stamp(row, self._worker_id, now, self._settings.timeout_grace)
        [outcome] = await self._backends.store.commit([change])
        await crashpoints.reach("worker.after_W5", row.task_id)
        if not outcome.won:
            await self._closing.settle_ids([row.id])  # somebody closed it: send nothing, help it along
            return Verdict.FINISHED
        return await self._post(task, _with(row, change), connection, request, stamped_at)

    async def _post(
        self, task: Task, row: Execution, connection: Connection, request: PushRequest, stamped_at: float
    ) -> Verdict:
        """W6. The clock is read as the last thing before the first byte."""

        def in_time() -> bool:
            crashpoints.reach_now("worker.before_W6", row.task_id)
            may = self._backends.clock.uptime() - stamped_at <= lifecycle.POST_WITHIN_S
            crashpoints.reach_now("worker.in_W6", row.task_id)  # the window that no write of ours can close
            return may

        answer = await self._central.push(connection, request, before_first_byte=in_time)
        await crashpoints.reach("worker.after_W6", row.task_id)
        self._breaker.note(answer)
        if answer.outcome == "unknown" and self._settings.central_deduplicates:
            answer = await self._repost(row, request)
        return await self._record(task, row, answer)

    async def _repost(self, row: Execution, request: PushRequest) -> PushAnswer:
        """Central control knows an id it has: the same one again, stamp renewed. Doubt stays: only 2xx or 409 counts."""
        answer = PushAnswer(outcome="unknown", message="the push was unclear")
        for n in range(REPOSTS):
            await asyncio.sleep(0.5 * 2**n)
            again = await self._post_in_doubt(
                row, request, lifecycle.restamp(row, self._worker_id, self._backends.clock.now())
            )
            if again is None:
                break
            answer = again
            if answer.outcome == "taken":
                break
        return answer

    async def _post_in_doubt(self, row: Execution, request: PushRequest, stamp: ChangeExecution) -> PushAnswer | None:
        """None: the row is closed, or another's by now."""
        unclear = PushAnswer(outcome="unknown", message="the push was unclear")
        try:
            connection = await self._central.checkout()
        except PushFailed:
            return unclear
        try:
            stamped_at = self._backends.clock.uptime()
            [outcome] = await self._backends.store.commit([stamp])
            if not outcome.won:
                return None
            in_time = _limit(self._backends.clock.uptime, stamped_at)
            return await self._central.push(connection, request, before_first_byte=in_time, in_doubt=True)
        finally:
            connection.release()

    async def take_over(self, execution_id: str) -> None:
        """M3: an execution of a dead worker whose push is unclear is posted again under its own id. Only for a central
        control that deduplicates; anything but "I have it" leaves it unclear, for result or deadline."""
        [row] = await self._backends.store.executions([execution_id])
        if row is None or not row.active or row.sending_at is None or row.push == "sent":
            return
        [task] = await self._backends.store.tasks([row.task_id])
        if task is None or task.execution_id != row.id:
            return
        prepared = await self._preparer.prepare(task)
        if prepared.error is not None or prepared.sha256 != row.script_sha256:
            return
        now = self._backends.clock.now()
        change = lifecycle.take_over(row, self._worker_id, now)
        answer = await self._post_in_doubt(row, request_of(task, row, prepared), change)
        if answer is None or answer.outcome != "taken":
            return
        row, now = _with(row, change), self._backends.clock.now()
        await self._insist(
            [
                lifecycle.record_push(row, "sent", now, self._settings.timeout_grace),
                lifecycle.sent(task, row, "sent", now, "taken by central control", self._worker_id),
                lifecycle.confirm_push(task, row, now),
            ]
        )

    # --- W7

    async def _record(self, task: Task, row: Execution, answer: PushAnswer) -> Verdict:
        if answer.outcome in ("taken", "unknown"):
            await self._sent(task, row, answer)
            return Verdict.FINISHED
        return await self._not_taken(row, answer, stamped=True)

    async def _sent(self, task: Task, row: Execution, answer: PushAnswer) -> None:
        """W7 taken or unknown, for a `task` as W4 left it. Lost: result, deadline or user was faster; all is left alone."""
        push: Push = "sent" if answer.outcome == "taken" else "unknown"
        now = self._backends.clock.now()
        reason = "taken by central control" if push == "sent" else f"push unclear: {answer.message}"
        change = lifecycle.sent(task, row, push, now, reason, self._worker_id)
        outcomes = await self._insist([lifecycle.record_push(row, push, now, self._settings.timeout_grace), change])
        await crashpoints.reach("worker.after_W7", row.task_id)
        if outcomes[1].won:
            self._closing.announce([applied(task, change)])

    async def _not_taken(self, row: Execution, answer: PushAnswer, *, stamped: bool) -> Verdict:
        """W7, certainly not taken: the worker closes its own row, then task and lock follow."""
        now = self._backends.clock.now()
        change = self._close_not_taken(row, answer, now, stamped)
        await self._insist([change])
        await crashpoints.reach("worker.after_K1", row.task_id)
        await self._closing.settle_ids([row.id])
        return Verdict.FINISHED

    def _close_not_taken(self, row: Execution, answer: PushAnswer, now: datetime, stamped: bool) -> ChangeExecution:
        code = {"device_gone": "DEVICE_NOT_FOUND", "device_busy": "DEVICE_BUSY"}.get(answer.outcome, "DISPATCH_FAILED")
        details: dict[str, Any] = {"http_status": answer.http_status} if answer.http_status else {}
        if answer.outcome == "wait":
            details["retry_after_seconds"] = answer.retry_after_s  # it asked, so `waiting_for` says so
        error = Error(code=code, message=answer.message, details=details)
        rest: dict[str, Any] = {"closed_by": self._worker_id, "reason": answer.message, "error": error}
        outcome: Outcome = "failed"
        push: Push = "not_sent"
        if answer.outcome in ("refused", "device_gone"):
            outcome, push = "refused", "refused"
        elif answer.outcome == "device_busy":
            push = "refused"
        elif answer.outcome == "not_sent" and not answer.connect_failed and answer.http_status is None:
            outcome = "handed_back"  # W6: too late for the first byte, or the connection had closed before it
        elif answer.outcome in ("wait", "misconfigured") or self._breaker.open:
            wait = timedelta(seconds=answer.retry_after_s) if answer.retry_after_s is not None else BREAKER_WAIT
            outcome, rest["retry_at"] = "handed_back", now + wait
        if stamped:
            return lifecycle.close_own(row, outcome, now, worker_id=self._worker_id, push=push, **rest)
        return lifecycle.close(row, outcome, now, expect={"sending_at": None}, push=push, **rest)

    async def _insist(self, changes: list[Any]) -> list[Any]:
        """The push is out: wait for a store that is away, as long as the shutdown allows."""
        deadline = self._backends.clock.uptime() + RECORD_TRIES_S
        pause_s = 0.05
        while True:
            try:
                return await self._backends.store.commit(changes)
            except StoreUnavailable as error:
                if self._backends.clock.uptime() > deadline:
                    raise  # M2 and the deadline take over
                log.warning("result of a push not stored yet", reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, pause_s * 2)

    # --- W9 and the rest

    async def _undo(self, row: Execution, why: str) -> None:
        """W9: not sent, and not going to be."""
        now = self._backends.clock.now()
        error = Error(code="SYSTEM_ERROR", message=why)
        change = lifecycle.close_unsent(row, "handed_back", now, closed_by=self._worker_id, reason=why, error=error)
        await self._backends.store.commit([change])
        await crashpoints.reach("worker.after_W9", row.task_id)
        await self._closing.settle_ids([row.id])

    async def _refuse_row(self, row: Execution, error: Error) -> Verdict:
        """It cannot be made ready for the push: closed `refused`, nothing is sent."""
        now = self._backends.clock.now()
        change = lifecycle.close_unsent(
            row, "refused", now, closed_by=self._worker_id, reason=error.message, error=error, retryable=False
        )
        await self._backends.store.commit([change])
        await self._closing.settle_ids([row.id])
        return Verdict.FINISHED

    async def _release(self, device_id: str | None, execution_id: str) -> None:
        if device_id is not None:
            await self._backends.locks.release([(device_id, execution_id)])

    async def _announce(self, task: Task, row: Execution) -> None:
        events: list[dict[str, Any]] = []
        if row.device_id is not None:
            events.append(
                {"event": "device.locked", "device_id": row.device_id, "task_id": task.id, "execution_id": row.id,
                 "fencing_token": row.fencing_token, "at": format_time(row.created_at)}
            )  # fmt: skip
        self._closing.announce([task], events)

    async def _internal_error(self, item: Leased, error: Exception) -> Verdict:
        """A bug, met before the task had an execution: it ends with the traceback and does not go round for ever."""
        log.exception("a bug", event_name="task.bug", task_id=item.task_id)
        try:
            [task] = await self._backends.store.tasks([item.task_id])
            if task is not None and lifecycle.is_executable(task.status):
                now = self._backends.clock.now()
                change = lifecycle.internal_failure(task, _bug(error), now, self._worker_id)
                [outcome] = await self._backends.store.commit([change])
                if outcome.won:
                    await self._closing.moved([applied(task, change)])
        except Unavailable as away:
            log.warning("not recorded", task_id=item.task_id, reason=str(away))
            return Verdict.WAIT
        return Verdict.FINISHED


def _begin(job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Its error is heard of, though nobody may ask for it."""
    begun = asyncio.create_task(job)
    begun.add_done_callback(lambda done: done.cancelled() or done.exception())
    return begun


def _is_due(task: Task | None, now: datetime) -> bool:
    if task is None or not lifecycle.is_executable(task.status):
        return False
    return task.next_run_at is None or task.next_run_at <= now


def _limit(uptime: Any, stamped_at: float) -> Any:
    return lambda: uptime() - stamped_at <= lifecycle.POST_WITHIN_S


def _with(row: Execution, change: ChangeExecution) -> Execution:
    return msgspec.structs.replace(row, **change.set)


def _bug(error: Exception) -> Error:
    trace = "".join(traceback.format_exception(error))[-4000:]
    return Error(code="INTERNAL_ERROR", message=f"a bug in scriptdispatch: {error!r}", details={"traceback": trace})
