"""Why a task is not moving: the sentence and its facts, made by the checks that decide (SPEC 2, `waiting_for`)."""

from datetime import datetime
from typing import Any

from msgspec import Struct

from scriptdispatch.domain.model import PAUSED, RETRY, SENT, WAITING, Breaker, Execution, Task


class WaitingFor(Struct, frozen=True, kw_only=True):
    reason: str
    message: str
    since: datetime | None = None
    until: datetime | None = None
    task_id: str | None = None
    position: int | None = None
    details: dict[str, Any] = {}


class Facts(Struct, frozen=True, kw_only=True):
    """What queue, locks and cluster say about one task, as read by the caller."""

    position: int | None = None  # its place among those that wait in the lane, 1 = next
    leased: bool = False  # a master or worker has it in hand
    holder: str | None = None  # value of the device's lock
    holder_task_id: str | None = None
    holder_since: datetime | None = None
    lock_service: bool = True
    breaker: Breaker = Breaker()
    workers: int = 0  # alive and serving this type
    free: int = 0  # capacity left in them


def waiting_for(task: Task, execution: Execution | None, facts: Facts, now: datetime) -> WaitingFor | None:
    """None: it is moving, or it is final. The order of the checks is the order in which they hold a task up."""
    if task.status == SENT:
        return _result(task, execution, now)
    if task.status == PAUSED:
        return WaitingFor(reason="paused", message="Paused by a user.", since=task.updated_at)
    if task.status not in (WAITING, RETRY):
        return None
    if task.next_run_at is not None and task.next_run_at > now:
        return _time(task, facts, now)
    if facts.leased:
        return None
    return _obstacle(task, facts, now)


def _obstacle(task: Task, facts: Facts, now: datetime) -> WaitingFor | None:
    due = task.next_run_at
    if facts.breaker.open:
        return _central(facts.breaker)
    if not facts.lock_service and task.device_id is not None:
        return WaitingFor(
            reason="lock_service",
            message="The lock service is being restored; nothing is sent until it is back.",
            since=due,
        )
    ahead = facts.position is not None and facts.position > 1
    if task.device_id is not None and (facts.holder is not None or ahead):
        return _device(task, facts, now)
    if facts.workers == 0:
        message = "No worker is running: start a node with `scriptdispatch serve`."
        return WaitingFor(reason="worker", message=message, since=due)
    if facts.free <= 0:
        message = f"All {facts.workers} workers are full."
        return WaitingFor(reason="worker", message=message, since=due, details={"workers": facts.workers})
    return None


def _time(task: Task, facts: Facts, now: datetime) -> WaitingFor:
    until = task.next_run_at
    assert until is not None
    span = in_words((until - now).total_seconds())
    if task.wait_code == "central":
        message = f"Central control asked to wait until {clock(until)} (in {span}). No retry is charged."
        return WaitingFor(reason="central", message=message, since=task.updated_at, until=until)
    if task.wait_code == "central_away":
        return _central(facts.breaker) if facts.breaker.open else _no_use(task, until, span)
    if task.status == RETRY:
        code = task.error.code if task.error else "failure"
        of = "" if task.retry.strategy in ("daily", "forever") else f" of {task.retry.max_retries}"
        message = (
            f"Attempt {task.attempt} failed: {code}. Tries again at {clock(until)} (in {span}), "
            f"retry {task.retry_count + 1}{of}."
        )
        details = {"attempt": task.attempt, "code": code, "retry": task.retry_count + 1}
        return WaitingFor(reason="retry", message=message, since=task.updated_at, until=until, details=details)
    message = f"Starts at {clock(until)} (in {span})."
    return WaitingFor(reason="due_time", message=message, since=task.created_at, until=until)


def _device(task: Task, facts: Facts, now: datetime) -> WaitingFor:
    place = facts.position or 1
    since = facts.holder_since
    if facts.holder_task_id:
        age = f" for {in_words((now - since).total_seconds())}" if since else ""
        who = f"…{facts.holder_task_id[-8:]} has had the device{age}"
    elif facts.holder is not None:
        who = f"its lock is held by {facts.holder[:60]!r}"
    else:
        who = "another task goes first"
    return WaitingFor(
        reason="device",
        message=f"{ordinal(place)} in the lane of {task.device_id}; {who}.",
        since=task.next_run_at,
        task_id=facts.holder_task_id,
        position=place,
        details={"device_id": task.device_id, "holder_since": since},
    )


def _no_use(task: Task, until: datetime, span: str) -> WaitingFor:
    message = (
        "Central control does not answer, or the settings for it are wrong. "
        f"Tries again at {clock(until)} (in {span}). No retry is charged."
    )
    return WaitingFor(reason="central", message=message, since=task.updated_at, until=until)


def _central(breaker: Breaker) -> WaitingFor:
    since = f" since {clock(breaker.since)}" if breaker.since else ""
    again = f"; next try {clock(breaker.probe_at)}" if breaker.probe_at else ""
    why = f" ({breaker.reason})" if breaker.reason else ""
    message = f"Central control does not answer{since}{why}. No retry is charged{again}."
    return WaitingFor(
        reason="central", message=message, since=breaker.since, until=breaker.probe_at, details={"why": breaker.reason}
    )


def _result(task: Task, execution: Execution | None, now: datetime) -> WaitingFor:
    until = execution.deadline_at if execution else None
    since = (execution.sent_at or execution.sending_at) if execution else task.updated_at
    at_latest = f", at the latest until {clock(until)}" if until else ""
    if task.cancel_requested:
        ago = in_words((now - (task.cancel_requested_at or now)).total_seconds())
        message = f"Cancel asked {ago} ago; waits for central control{at_latest}."
    elif task.push == "unknown":
        message = f"The push was unclear and is not repeated; waits for a result{at_latest}."
    else:
        age = in_words((now - since).total_seconds()) if since else "a while"
        message = f"On the device for {age}; waits for its result{at_latest}."
    return WaitingFor(reason="result", message=message, since=since, until=until)


def clock(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def ordinal(n: int) -> str:
    tail = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{tail}"


def in_words(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{int(seconds * 1000)} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{int(seconds)} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d"
