"""The life of a task: the one table of transitions, and every change as a value made by a named constructor.

Step names (W4, K1, ...) are those of PROTOCOL.md. A constructor decides; a store only applies the result if what was
read still holds. Nothing else in the product may build a change of status.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from scriptdispatch.domain import retry as retries
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask, InsertTask
from scriptdispatch.domain.model import (
    CANCELED,
    EXECUTABLE,
    FAILED,
    FINAL,
    PAUSED,
    RETRY,
    RUNNING,
    SENT,
    SUCCESS,
    UNDER_WAY,
    WAITING,
    Error,
    Execution,
    ExecutionStatus,
    History,
    HistoryKind,
    Outcome,
    Push,
    Script,
    Status,
    Task,
)

TRANSITIONS: Final[Mapping[Status, Mapping[Status, str]]] = {
    WAITING: {
        RUNNING: "a worker starts it",
        PAUSED: "a user pauses it",
        CANCELED: "a user cancels it",
        RETRY: "the device's lock is held by somebody else than us, and a retry is left",
        FAILED: "no retry left, dependency failed, poison, overridden",
    },
    RUNNING: {
        SENT: "the push was taken, or its outcome is unclear",
        SUCCESS: "a result overtook the worker",
        RETRY: "the push failed and a retry is left, or it is handed back to where it came from",
        FAILED: "the push failed for good",
        CANCELED: "a user cancels it before it is sent",
        WAITING: "handed back to where it came from, at no cost",
    },
    SENT: {
        SUCCESS: "central control reports success",
        RETRY: "central control reports failure, or the deadline passed, and a retry is left",
        FAILED: "failure or deadline, and no retry is left; forced release",
        CANCELED: "central control confirms a cancel, or a user forces it",
    },
    RETRY: {
        RUNNING: "its retry starts",
        FAILED: "no retry left, poison, overridden",
        PAUSED: "a user pauses it",
        CANCELED: "a user cancels it",
        SUCCESS: "a late success of its latest execution",
        RETRY: "the device's lock is held by somebody else than us again",
    },
    PAUSED: {
        WAITING: "a user resumes it",
        RETRY: "a user resumes it",
        CANCELED: "a user cancels it",
        SUCCESS: "a late success of its latest execution",
    },
    SUCCESS: {},
    FAILED: {WAITING: "a user restarts it: a new round", SUCCESS: "an operator overrides it"},
    CANCELED: {WAITING: "a user restarts it: a new round", SUCCESS: "an operator overrides it"},
}

RETRYABLE: Final = frozenset(("DEVICE_BUSY", "DISPATCH_FAILED", "EXECUTION_FAILED", "TIMEOUT", "SYSTEM_ERROR"))
POISON_LIMIT: Final = 3  # the third hand-back in a row because of a dead worker is final
PUSH_WINDOW: Final = timedelta(seconds=25)  # W6: after this a stamped push is certainly over
POST_WITHIN_S: Final = 5.0  # W6: the first byte leaves at most this long after the stamp
POST_LIMIT_S: Final = 20.0  # W6: and the request is over after this


class IllegalTransition(AssertionError):
    """A bug: somebody built a change that the table does not have."""


def check(from_status: Status, to_status: Status) -> None:
    if to_status not in TRANSITIONS[from_status]:
        raise IllegalTransition(f"{from_status} -> {to_status} is not in the table")


# ------------------------------------------------------------------------------------------------------------ the task


def create(task: Task, script: Script | None) -> InsertTask:
    history = History(
        at=task.created_at,
        kind="STATE_CHANGE",
        to_status=WAITING,
        actor=task.created_by or "anonymous",
        reason="created",
    )
    return InsertTask(task=task, script=script, history=history)


def mark_unqueued(task: Task) -> ChangeTask:
    """The push to the ready queue failed. Honest for the reader; the loader finds it whatever this says."""
    return ChangeTask(task_id=task.id, expect={"status": WAITING, "attempt": 0}, set={"queued": False})


def mark_queued(task: Task) -> ChangeTask:
    return ChangeTask(task_id=task.id, expect={"status": task.status, "queued": False}, set={"queued": True})


def start(task: Task, execution: Execution, now: datetime) -> ChangeTask:
    """W4. Compares all that was read after W2, so an item that was delivered twice starts once."""
    retrying = task.status == RETRY
    change = {
        "execution_id": execution.id,
        "attempt": execution.attempt,
        "push": "not_sent",
        "worker_id": execution.worker_id,
        "node_id": execution.node_id,
        "started_at": now,
        "first_started_at": task.first_started_at or now,
        "next_run_at": None,
        "wait_code": None,
        "progress": 0,
        "step": None,
    }
    if retrying:
        change["retry_count"] = task.retry_count + 1
    return _move(
        task,
        RUNNING,
        now,
        actor=execution.worker_id,
        reason="retry starts" if retrying else "started",
        execution=execution,
        set=change,
        expect={"execution_id": task.execution_id, "round": task.round, "retry_count": task.retry_count},
    )


def foreign_lock(task: Task, holder: str, worker_id: str, now: datetime, chance: float) -> ChangeTask:
    """W2: the lock has a value that is no execution id of ours. Costs a retry; a retry that meets it is used up."""
    count = task.retry_count + (task.status == RETRY)
    error = Error(
        code="DEVICE_BUSY",
        message=f"the lock of {task.device_id} is held by {holder[:100]!r}, which is not an execution of ours",
        details={"holder": holder[:200]},
    )
    # The count too: a retry that met the lock leaves state and execution as they were, and must not be met twice.
    expect = {"execution_id": task.execution_id, "round": task.round, "retry_count": task.retry_count}
    return _failed_or_retry(task, count, error, now, chance, worker_id, error.message, None, expect)


def sent(task: Task, execution: Execution, push: Push, now: datetime, reason: str, actor: str) -> ChangeTask:
    """W7 and M2: taken or unclear. Loses to whatever result, deadline or user was faster, and then nothing is to do. `task`
    as it was read at any time since the execution's start: its retry count stays what it is until then."""
    check(RUNNING, SENT)
    history = History(
        at=now,
        kind="STATE_CHANGE",
        from_status=RUNNING,
        to_status=SENT,
        actor=actor,
        reason=reason,
        worker_id=execution.worker_id,
        execution_id=execution.id,
        retry_count=task.retry_count,
    )
    return ChangeTask(
        task_id=task.id,
        expect={"status": RUNNING, "execution_id": execution.id},
        set={"status": SENT, "push": push, "updated_at": now},
        history=history,
    )


def confirm_push(task: Task, execution: Execution, now: datetime) -> ChangeTask:
    """After M3: what was unclear is known to be taken."""
    history = History(
        at=now, kind="INFO", actor="recovery", execution_id=execution.id, retry_count=task.retry_count,
        reason="central control has it: the push is clear",
    )  # fmt: skip
    return ChangeTask(
        task_id=task.id,
        expect={"status": SENT, "execution_id": execution.id, "push": "unknown"},
        set={"push": "sent", "updated_at": now},
        history=history,
    )


def progress(task_id: str, execution_id: str, percent: int | None, step: str | None, now: datetime) -> ChangeTask:
    change: dict[str, Any] = {"updated_at": now}
    if percent is not None:
        change["progress"] = max(0, min(100, percent))
    if step is not None:
        change["step"] = step
    return ChangeTask(task_id=task_id, expect={"status": (RUNNING, SENT), "execution_id": execution_id}, set=change)


def cancel_waiting(task: Task, actor: str, reason: str, now: datetime) -> ChangeTask:
    """U1. A worker that already has a row for it loses W4 and undoes."""
    error = Error(code="CANCELED", message=reason or "canceled by a user")
    return _move(
        task,
        CANCELED,
        now,
        actor=actor,
        reason=reason or "canceled",
        set=_ended(now, error=error),
        expect={"execution_id": task.execution_id, "round": task.round},
    )


def request_cancel(task: Task, actor: str, reason: str, now: datetime) -> ChangeTask:
    """U3. From here on no retry: K2 compares the flag."""
    history = History(
        at=now,
        kind="INFO",
        actor=actor,
        reason=f"cancel requested: {reason}" if reason else "cancel requested",
        execution_id=task.execution_id,
        retry_count=task.retry_count,
    )
    return ChangeTask(
        task_id=task.id,
        expect={"status": (RUNNING, SENT), "execution_id": task.execution_id, "cancel_requested": False},
        set={"cancel_requested": True, "cancel_requested_at": now, "cancel_reason": reason or None, "updated_at": now},
        history=history,
    )


def cancel_answered(task_id: str, execution_id: str, answer: str, now: datetime) -> ChangeTask:
    """May come after the end: so it changes nothing that the API shows, not even `updated_at` (see `late_note`)."""
    words = {"will_try": "central control will try to cancel it", "never_had": "central control never had this execution"}
    history = History(at=now, kind="INFO", actor="central", reason=words[answer], execution_id=execution_id)
    return ChangeTask(
        task_id=task_id,
        expect={"execution_id": execution_id, "cancel_requested": True, "cancel_answer": None},
        set={"cancel_answer": answer},
        history=history,
    )


def poison(task: Task, now: datetime, actor: str) -> ChangeTask:
    """M1 for a task that has not passed W4: it kills its workers before anything is written."""
    error = poison_error()
    return _move(
        task, FAILED, now, actor=actor, reason=error.message, error=error,
        set=_ended(now, error=error), expect={"execution_id": task.execution_id, "round": task.round},
    )  # fmt: skip


def poison_error() -> Error:
    return Error(
        code="SYSTEM_ERROR",
        message=f"its worker died {POISON_LIMIT} times in a row with this task in hand; it is not tried again",
        details={"poison": True},
    )


def internal_failure(task: Task, error: Error, now: datetime, actor: str) -> ChangeTask:
    """A bug met before the task had an execution: it ends with the traceback instead of going round for ever."""
    return _move(
        task, FAILED, now, actor=actor, reason=error.message, error=error,
        set=_ended(now, error=error), expect={"execution_id": task.execution_id, "round": task.round},
    )  # fmt: skip


def late_note(task_id: str, execution: Execution, word: str, now: datetime) -> ChangeTask:
    """A terminal message after the row was closed otherwise: a history row and no more. What a final task answers is never
    changed by what comes after its end; readers may have it from a cache."""
    history = History(
        at=now, kind="INFO", actor="closer", execution_id=execution.id,
        reason=f"{word} of attempt {execution.attempt} came after it was closed ({execution.outcome}); stored only",
    )  # fmt: skip
    return ChangeTask(task_id=task_id, expect={}, set={}, history=history)


# ---------------------------------------------------------------------------------------------------- the execution row


def stamp(execution: Execution, worker_id: str, now: datetime, grace_s: float) -> ChangeExecution:
    """W5, the point of no return. Lost: somebody closed the row, and nothing may be sent."""
    return ChangeExecution(
        execution_id=execution.id,
        expect={"active": True, "sending_at": None},
        set={
            "sending_at": now,
            "sent_by": worker_id,
            "push": "unknown",  # until W7 says more: whoever finds the row after a crash here knows no better
            "deadline_at": now + timedelta(seconds=execution.timeout_seconds + grace_s),
        },
    )


def restamp(execution: Execution, worker_id: str, now: datetime) -> ChangeExecution:
    """W5 again, before an unclear push is repeated (only with `central_deduplicates`). The deadline keeps the first."""
    return ChangeExecution(execution_id=execution.id, expect={"active": True, "sent_by": worker_id}, set={"sending_at": now})


def take_over(execution: Execution, worker_id: str, now: datetime) -> ChangeExecution:
    """M3: the stamp of a dead worker becomes this one's (only with `central_deduplicates`). From here on the dead one's
    own "not sent" loses. The deadline keeps the first stamp."""
    return ChangeExecution(
        execution_id=execution.id,
        expect={"active": True, "sent_by": execution.sent_by, "sending_at": execution.sending_at},
        set={"sent_by": worker_id, "sending_at": now},
    )


def record_push(execution: Execution, push: Push, now: datetime, grace_s: float) -> ChangeExecution:
    """W7 on the row: the deadline counts from `taken`. Not decisive, so an outcome that was faster keeps its own."""
    change: dict[str, Any] = {"push": push, "answered_at": now}
    if push == "sent":
        change["sent_at"] = now
        change["deadline_at"] = now + timedelta(seconds=execution.timeout_seconds + grace_s)
    return ChangeExecution(execution_id=execution.id, expect={"sent_by": execution.sent_by}, set=change)


_CLOSED_STATUS: Final[Mapping[Outcome, ExecutionStatus]] = {
    "success": "success",
    "failed": "failed",
    "refused": "failed",
    "timeout": "failed",
    "released": "failed",
    "dropped": "canceled",
    "canceled": "canceled",
    "handed_back": "failed",
}


def close(
    execution: Execution,
    outcome: Outcome,
    now: datetime,
    *,
    closed_by: str,
    reason: str,
    error: Error | None = None,
    expect: Mapping[str, Any] | None = None,
    **values: Any,
) -> ChangeExecution:
    """K1, the one write that decides an execution, possible once. `expect` is what the actor adds to "row is open"."""
    change: dict[str, Any] = {
        "active": False,
        "outcome": outcome,
        "status": _CLOSED_STATUS[outcome],
        "error": error,
        "closed_by": closed_by,
        "reason": reason,
        "finished_at": now,
        **values,
    }
    return ChangeExecution(execution_id=execution.id, expect={"active": True, **(expect or {})}, set=change)


def close_unsent(execution: Execution, outcome: Outcome, now: datetime, **rest: Any) -> ChangeExecution:
    """M1, R4, U2, W9: only while it is provably unsent."""
    return close(execution, outcome, now, expect={"sending_at": None}, push="not_sent", **rest)


def close_own(execution: Execution, outcome: Outcome, now: datetime, *, worker_id: str, **rest: Any) -> ChangeExecution:
    """W7 not sent, refused, asked to wait: the stamp must still be this worker's."""
    return close(execution, outcome, now, expect={"sent_by": worker_id}, **rest)


def give_up(execution: Execution, outcome: Outcome, now: datetime, **rest: Any) -> ChangeExecution:
    """T1, U4, D1: close a row whose script may still run. Asks that the stamp is the one that was read."""
    return close(execution, outcome, now, expect={"sending_at": execution.sending_at}, **rest)


def being_pushed(execution: Execution, now: datetime) -> bool:
    """Is the first byte perhaps still to leave? Then T1 comes again, and a user gets 409."""
    if execution.sending_at is None or execution.push == "sent":
        return False
    return now - execution.sending_at < PUSH_WINDOW


def note_late_success(execution: Execution, **values: Any) -> ChangeExecution:
    """C2: a success of a row that its deadline closed. `values` is what the message brought (result, exit code)."""
    return ChangeExecution(
        execution_id=execution.id,
        expect={"active": False, "outcome": "timeout", "late_success": False},
        set={"late_success": True, **values},
    )


def note_late_result(execution: Execution, word: str) -> ChangeExecution:
    return ChangeExecution(
        execution_id=execution.id, expect={"active": False, "late_result": None}, set={"late_result": word}
    )


# ---------------------------------------------------------------------------------------------- the task follows its row


def settle(task: Task, row: Execution, now: datetime, chance: float) -> ChangeTask | None:
    """K2: what becomes of a task whose execution is closed. None: nothing (any more). A pure function of both as read;
    lost means that one of them changed: read again and decide again."""
    if row.active or task.status not in UNDER_WAY or task.execution_id != row.id:
        return None
    if row.outcome == "success" or row.late_success:
        return _succeed(task, row, now)
    if row.outcome == "released":
        return _fail(task, row, now)
    if row.outcome in ("canceled", "dropped"):
        return _cancel(task, row, now)
    if task.cancel_requested:
        return _cancel(task, row, now)
    if row.outcome == "refused":
        return _fail(task, row, now)
    if row.outcome == "handed_back" and task.status == RUNNING:
        if task.late_success_of is not None and task.late_success_of == row.previous_execution_id:
            return _succeed_before(task, row, now)
        return _hand_back(task, row, now)
    return _retry_or_fail(task, row, now, chance)


def settle_presumed(row: Execution, now: datetime) -> tuple[Task, ChangeTask] | None:
    """K2 without reading the task: after a first execution whose push was recorded, and which has succeeded just now, there
    is hardly a doubt what it is like. The change expects all that is presumed; lost: read, and decide by `settle`. None:
    read. Of the task answered only what a change of state announces is true: ids, states and numbers."""
    if row.outcome != "success" or row.attempt != 1 or row.sent_at is None:
        return None
    task = Task(
        id=row.task_id, name="", device_id=row.device_id, lane_key="", next_run_at=None, created_at=row.created_at,
        updated_at=row.created_at, status=SENT, round=row.round, attempt=1, push="sent", execution_id=row.id,
    )  # fmt: skip
    change = _succeed(task, row, now)
    expect = {**change.expect, "retry_count": task.retry_count, "type": task.type}
    return task, msgspec.structs.replace(change, expect=expect)


def settle_late(task: Task, row: Execution, now: datetime) -> ChangeTask | None:
    """C3 for a late success: ends a task that waits for its retry; noted on one whose next execution has begun."""
    if not row.late_success:
        return None
    if task.status in (RETRY, PAUSED) and task.execution_id == row.id:
        return _succeed(task, row, now)
    # Ids are time-ordered: the success of an older execution must not hide that of a newer one, which a hand-back looks for.
    newest = task.late_success_of is None or task.late_success_of < row.id
    if task.status == RUNNING and task.execution_id != row.id and newest and task.round == row.round:
        return ChangeTask(
            task_id=task.id,
            expect={"status": RUNNING, "execution_id": task.execution_id, "late_success_of": task.late_success_of},
            set={"late_success_of": row.id},
        )
    return None


def _succeed(task: Task, row: Execution, now: datetime) -> ChangeTask:
    change = _ended(now, error=None)
    change |= {"result": row.result, "progress": 100, "push": row.push}
    return _settled(task, row, SUCCESS, now, change)


def _succeed_before(task: Task, row: Execution, now: datetime) -> ChangeTask:
    """The row is handed back, and the execution before it has succeeded late: the task ends as that one's."""
    change = _ended(now, error=None)
    change |= {"progress": 100} | _as_before(task, row)
    return _settled(task, row, SUCCESS, now, change)


def _fail(task: Task, row: Execution, now: datetime) -> ChangeTask:
    change = _ended(now, error=row.error)
    change |= {"result": row.result, "push": row.push}
    return _settled(task, row, FAILED, now, change)


def _cancel(task: Task, row: Execution, now: datetime) -> ChangeTask:
    details: dict[str, Any] = {}
    if row.outcome == "timeout":
        details["unconfirmed"] = True
    elif row.error is not None:
        details["execution_error"] = {"code": row.error.code, "message": row.error.message}
    asked = task.cancel_reason if row.outcome != "dropped" else None  # a forced cancel has words of its own
    error = Error(code="CANCELED", message=asked or row.reason or "canceled", details=details)
    change = _ended(now, error=error)
    change |= {"push": row.push}
    return _settled(task, row, CANCELED, now, change)


def _hand_back(task: Task, row: Execution, now: datetime) -> ChangeTask:
    change: dict[str, Any] = _as_before(task, row) | {
        "next_run_at": row.retry_at or now,
        "wait_code": _wait_code(row),
        "worker_id": None,
        "node_id": None,
        "queued": True,
    }
    return _settled(task, row, row.from_status, now, change, error=row.error)


def _wait_code(row: Execution) -> str | None:
    """Did central control ask to wait (then the error says for how long), or was it of no use?"""
    if row.retry_at is None:
        return None
    asked = row.error is not None and "retry_after_seconds" in row.error.details
    return "central" if asked else "central_away"


def _as_before(task: Task, row: Execution) -> dict[str, Any]:
    """What W4 changed, as it was before."""
    return {
        "execution_id": row.previous_execution_id,
        "push": row.previous_push,
        "retry_count": task.retry_count - (row.from_status == RETRY),
    }


def _retry_or_fail(task: Task, row: Execution, now: datetime, chance: float) -> ChangeTask:
    assert row.error is not None
    retryable = row.retryable and row.error.code in RETRYABLE
    if not retryable or not retries.retries_left(task.retry, task.retry_count):
        return _fail(task, row, now)
    change = _retry(task, task.retry_count, row.error, now, chance)
    change["push"] = row.push
    return _settled(task, row, RETRY, now, change, error=row.error)


def _settled(
    task: Task, row: Execution, to: Status, now: datetime, change: dict[str, Any], error: Error | None = None
) -> ChangeTask:
    expect = {
        "execution_id": task.execution_id,
        "cancel_requested": task.cancel_requested,
        "late_success_of": task.late_success_of,
    }
    return _move(
        task,
        to,
        now,
        actor=row.closed_by or "system",
        reason=row.reason or to,
        execution=row,
        set=change,
        expect=expect,
        error=error or change.get("error"),
    )


def _failed_or_retry(
    task: Task,
    count: int,
    error: Error,
    now: datetime,
    chance: float,
    actor: str,
    reason: str,
    execution: Execution | None,
    expect: dict[str, Any],
) -> ChangeTask:
    if retries.retries_left(task.retry, count):
        change = _retry(task, count, error, now, chance)
        to: Status = RETRY
    else:
        change = _ended(now, error=error)
        to = FAILED
    change["retry_count"] = count
    return _move(task, to, now, actor=actor, reason=reason, execution=execution, set=change, expect=expect, error=error)


def _retry(task: Task, count: int, error: Error, now: datetime, chance: float) -> dict[str, Any]:
    first = task.first_failed_at or now
    return {
        "error": error,
        "first_failed_at": first,
        "next_run_at": retries.retry_at(task.retry, count + 1, now, first, chance),
        "wait_code": None,
        "queued": True,
    }


def _ended(now: datetime, *, error: Error | None) -> dict[str, Any]:
    return {"error": error, "finished_at": now, "next_run_at": None, "wait_code": None, "queued": False}


def _move(
    task: Task,
    to: Status,
    now: datetime,
    *,
    actor: str,
    reason: str,
    set: dict[str, Any],
    expect: dict[str, Any],
    execution: Execution | None = None,
    error: Error | None = None,
) -> ChangeTask:
    """Every change of status is built here, so the table is checked on each."""
    check(task.status, to)
    history = History(
        at=now,
        kind=_kind(to),
        from_status=task.status,
        to_status=to,
        actor=actor,
        reason=reason,
        worker_id=execution.worker_id if execution else None,
        execution_id=execution.id if execution else None,
        retry_count=set.get("retry_count", task.retry_count),
        error=error or set.get("error"),
    )
    return ChangeTask(
        task_id=task.id,
        expect={"status": task.status, **expect},
        set={"status": to, "updated_at": now, **set},
        history=history,
    )


def _kind(to: Status) -> HistoryKind:
    if to == RETRY:
        return "RETRY"
    return "ERROR" if to == FAILED else "STATE_CHANGE"


def is_final(status: Status) -> bool:
    return status in FINAL


def is_executable(status: Status) -> bool:
    return status in EXECUTABLE
