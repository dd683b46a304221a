"""What a person may do to a task or device: cancel (U1–U4) and forced release (D1–D3). API, CLI and console end here."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from scriptdispatch import logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution
from scriptdispatch.domain.model import CANCELED, FINAL, PAUSED, RETRY, RUNNING, WAITING, Error, Execution, Task
from scriptdispatch.errors import CentralUnavailable, QueueUnavailable, Refused
from scriptdispatch.locks.port import Lock
from scriptdispatch.metrics import Metrics
from scriptdispatch.services.closing import Closing, applied
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

TRIES = 8
log = logs.get("actions")
AskCentral = Callable[[str], Awaitable[str]]


class Actions:
    """`ask_central` cancels an execution there; None where this process does not talk to central control."""

    def __init__(self, backends: Backends, settings: Settings, ask_central: AskCentral | None = None) -> None:
        self._backends, self._ask_central = backends, ask_central
        self.metrics = Metrics()
        self._closing = Closing(backends, settings, role="web", metrics=self.metrics)

    async def cancel(
        self, task_id: str, *, actor: str, reason: str = "", force: bool = False, expected_status: str | None = None
    ) -> tuple[Task, bool]:
        """(task, True): canceled now. (task, False): sent already, central control is asked. Decided on what is stored:
        who loses a race reads again."""
        for _ in range(TRIES):
            task = await self._task(task_id)
            if expected_status is not None and task.status != expected_status:
                raise _illegal(task, f"it is {task.status}, not {expected_status}: look again, then decide")
            if task.status == CANCELED:
                return task, True
            if task.status in FINAL:
                raise _illegal(task, f"it is {task.status} already and cannot be canceled")
            done = await self._try_cancel(task, actor, reason, force)
            if done is not None:
                return await self._task(task_id), done
        raise Refused(503, "store_unavailable", "the task kept changing; try again", outcome="known")

    async def _try_cancel(self, task: Task, actor: str, reason: str, force: bool) -> bool | None:
        """None: lost to somebody, look again."""
        now = self._backends.clock.now()
        if task.status in (WAITING, RETRY, PAUSED):
            return await self._cancel_waiting(task, actor, reason, now)
        row = await self._row(task)
        if row is None or not row.active:
            if row is not None:
                await self._closing.settle([row])  # closed, the task had not followed yet
            return None
        if row.sending_at is None and task.status == RUNNING:
            return await self._cancel_unsent(row, actor, reason, now)
        if force:
            return await self._force(task, row, actor, reason, now)
        return await self._request(task, row, actor, reason, now)

    async def _cancel_waiting(self, task: Task, actor: str, reason: str, now: datetime) -> bool | None:
        """U1."""
        change = lifecycle.cancel_waiting(task, actor, reason, now)
        [outcome] = await self._backends.store.commit([change])
        if not outcome.won:
            return None
        try:
            await self._backends.queue.remove([task.id])
        except QueueUnavailable as error:
            log.warning("left in the queue; whoever takes it finds it canceled", task_id=task.id, error=str(error))
        await self._closing.moved([applied(task, change)])
        return True

    async def _cancel_unsent(self, row: Execution, actor: str, reason: str, now: datetime) -> bool | None:
        """U2, against W5 on the row: one of the two wins."""
        why = reason or "canceled before it was sent"
        change = lifecycle.close_unsent(
            row, "canceled", now, closed_by=actor, reason=why, error=Error(code="CANCELED", message=why)
        )
        return await self._close(change, row)

    async def _force(self, task: Task, row: Execution, actor: str, reason: str, now: datetime) -> bool | None:
        """U4: not while the push may be under way, or a script could start after "canceled" was answered."""
        if lifecycle.being_pushed(row, now):
            raise _illegal(task, "its push is under way; try again in 25 s")
        why = f"forced cancel: {reason}" if reason else "forced cancel"
        change = lifecycle.give_up(
            row, "dropped", now, closed_by=actor, reason=why, error=Error(code="CANCELED", message=why)
        )
        done = await self._close(change, row)
        if done:
            await self._tell_central(row)
        return done

    async def _request(self, task: Task, row: Execution, actor: str, reason: str, now: datetime) -> bool | None:
        """U3. The flag is durable first; then central control is asked, and again by the reconciler until it answers."""
        if not task.cancel_requested:
            [outcome] = await self._backends.store.commit([lifecycle.request_cancel(task, actor, reason, now)])
            if not outcome.won:
                return None
            await self._announce(task.id)
        if task.cancel_answer is None:
            await self._tell_central(row)
        return False

    async def _tell_central(self, row: Execution) -> None:
        """`row` as read before asking: while its push is under way, "never had it" may be true for a moment only."""
        if self._ask_central is None:
            return
        too_early = lifecycle.being_pushed(row, self._backends.clock.now())
        try:
            answer = await self._ask_central(row.id)
        except CentralUnavailable as error:
            log.info("central control was not reached; it is asked again", execution_id=row.id, error=str(error))
            return
        if answer == "never_had" and too_early:
            log.info("central control does not have it yet; it is asked again", execution_id=row.id)
            return
        change = lifecycle.cancel_answered(row.task_id, row.id, answer, self._backends.clock.now())
        await self._backends.store.commit([change])

    async def unlock(self, device_id: str, *, actor: str, reason: str, fencing_token: int | None = None) -> dict[str, Any]:
        """D1–D3. Closes the open execution of the device; deleting the lock alone would be undone by R2."""
        now = self._backends.clock.now()
        rows = await self._backends.store.open_executions(devices=[device_id], limit=1)
        if not rows:
            return await self._unlock_bare(device_id, fencing_token)
        row = rows[0]
        if fencing_token is not None and row.fencing_token != fencing_token:
            raise Refused(
                409, "lock_changed",
                f"the lock of {device_id} has another holder by now (fencing token {row.fencing_token})",
                current=row.fencing_token,
            )  # fmt: skip
        if lifecycle.being_pushed(row, now):
            raise Refused(409, "illegal_state", "a push to this device is under way; try again in 25 s", current="push")
        why = f"lock released by {actor}: {reason}"
        error = Error(code="LOCK_RELEASED", message=why)
        change = lifecycle.give_up(row, "released", now, closed_by=actor, reason=why, error=error)
        if not await self._close(change, row):
            raise Refused(409, "lock_changed", "the execution ended while you were asking; look again")
        return {"device_id": device_id, "task_id": row.task_id, "execution_id": row.id, "fencing_token": row.fencing_token}

    async def _unlock_bare(self, device_id: str, fencing_token: int | None) -> dict[str, Any]:
        """A lock without an execution: left over, or set by somebody else."""
        lock: Lock | None = (await self._backends.locks.holders([device_id])).get(device_id)
        if lock is None:
            raise Refused(404, "lock_not_found", f"{device_id} has no lock: there is nothing to release")
        if fencing_token is not None:
            raise Refused(409, "lock_changed", f"the lock of {device_id} has another holder by now", current=None)
        if not await self._backends.locks.force(device_id, lock.value):
            raise Refused(409, "lock_changed", "the lock changed hands while you were asking; look again")
        return {"device_id": device_id, "task_id": lock.task_id, "execution_id": None, "fencing_token": None}

    async def _close(self, change: ChangeExecution, row: Execution) -> bool | None:
        """K1, then K2 and K3 whoever won it."""
        [outcome] = await self._backends.store.commit([change])
        await self._closing.settle_ids([row.id])
        return True if outcome.won else None

    async def _announce(self, task_id: str) -> None:
        self._closing.announce([await self._task(task_id)])

    async def _task(self, task_id: str) -> Task:
        [task] = await self._backends.store.tasks([task_id])
        if task is None:
            raise Refused(404, "task_not_found", f"there is no task {task_id}")
        return task

    async def _row(self, task: Task) -> Execution | None:
        if task.execution_id is None:
            return None
        [row] = await self._backends.store.executions([task.execution_id])
        return row


def _illegal(task: Task, detail: str) -> Refused:
    return Refused(409, "illegal_state", detail, current=task.status)
