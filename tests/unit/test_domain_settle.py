"""K2: what becomes of a task whose execution is closed. The table of the protocol, restated here as data, row by row."""

from datetime import timedelta
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.model import STATUSES, Error, Execution, Outcome, Retry, Status, Task
from tests.unit.domain_values import EARLIER, NOW, applied, holds, make_row, make_task

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
UNDER_WAY: tuple[Status, ...] = ("running", "send_success")

# outcome -> what the task becomes, as (rule, also if cancel_requested). The rules:
#   a state        always that one
#   again          failed_waiting_retry, at max_retries failed
#   back           from running: the state it came from; from send_success: again
K2: dict[str, tuple[str, str]] = {
    "success": ("success", "success"),
    "failed": ("again", "canceled"),
    "refused": ("failed", "canceled"),
    "timeout": ("again", "canceled"),
    "released": ("failed", "failed"),
    "dropped": ("canceled", "canceled"),
    "canceled": ("canceled", "canceled"),
    "handed_back": ("back", "canceled"),
}


def restated(task: Task, row: Execution) -> Status:
    """The K2 table, read independently of the code."""
    if row.outcome == "timeout" and row.late_success:
        return "success"
    rule = K2[row.outcome or ""][task.cancel_requested]
    if rule == "back" and task.status == "running":
        if task.late_success_of and task.late_success_of == row.previous_execution_id:
            return "success"
        return row.from_status
    if rule in ("again", "back"):
        return "failed_waiting_retry" if task.retry_count < task.retry.max_retries else "failed"
    return rule  # type: ignore[return-value]


def under_way(row: Execution, **values: object) -> Task:
    """The task as W4 left it for this row, with one retry begun and two left unless said otherwise."""
    defaults = {"status": "running", "execution_id": row.id, "retry_count": 1, "attempt": row.attempt, "next_run_at": None}
    return make_task(**{**defaults, **values})


def settled(task: Task, row: Execution) -> Task:
    change = lifecycle.settle(task, row, NOW, 0.0)
    assert change is not None
    after: Task = applied(task, change)
    assert change.history is not None
    assert (change.history.from_status, change.history.to_status) == (task.status, after.status)
    assert (change.history.actor, change.history.reason) == (row.closed_by, row.reason)
    assert change.history.execution_id == row.id
    return after


# ------------------------------------------------------------------------------------------------- row by row


@pytest.mark.parametrize("status", UNDER_WAY)
def test_success_ends_the_task_with_its_result(status: Status) -> None:
    row = make_row(outcome="success", result={"n": 1}, push="sent")
    after = settled(under_way(row, status=status), row)
    assert (after.status, after.result, after.progress, after.error, after.push) == ("success", {"n": 1}, 100, None, "sent")
    assert (after.finished_at, after.next_run_at, after.queued) == (NOW, None, False)


def test_success_wins_over_a_requested_cancel() -> None:
    row = make_row(outcome="success")
    assert settled(under_way(row, cancel_requested=True), row).status == "success"


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("outcome", ["failed", "timeout"])
def test_a_failure_or_timeout_with_a_retry_left_waits_for_it(status: Status, outcome: Outcome) -> None:
    row = make_row(outcome=outcome, push="sent")
    task = under_way(row, status=status, retry=Retry(strategy="exponential", max_retries=3, delay_seconds=10, jitter=False))
    after = settled(task, row)
    assert (after.status, after.error, after.push) == ("failed_waiting_retry", row.error, "sent")
    assert after.next_run_at == NOW + timedelta(seconds=20), "the second retry"
    assert (after.retry_count, after.execution_id) == (1, row.id), "the count rises when the retry starts, not now"
    assert (after.queued, after.finished_at, after.first_failed_at) == (True, None, NOW)


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("outcome", ["failed", "timeout"])
def test_a_failure_or_timeout_at_max_retries_is_final(status: Status, outcome: Outcome) -> None:
    row = make_row(outcome=outcome)
    after = settled(under_way(row, status=status, retry_count=3, retry=Retry(max_retries=3)), row)
    assert (after.status, after.error, after.finished_at, after.queued) == ("failed", row.error, NOW, False)


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("outcome", ["failed", "refused", "timeout", "handed_back"])
def test_after_a_cancel_request_nothing_is_tried_again(status: Status, outcome: Outcome) -> None:
    row = make_row(outcome=outcome)
    after = settled(under_way(row, status=status, cancel_requested=True), row)
    assert after.status == "canceled"
    assert after.error is not None
    assert after.error.code == "CANCELED"


def test_a_cancel_that_nobody_confirmed_until_the_deadline_says_so() -> None:
    row = make_row(outcome="timeout")
    after = settled(under_way(row, status="send_success", cancel_requested=True), row)
    assert after.error is not None
    assert after.error.details == {"unconfirmed": True}


@pytest.mark.parametrize("status", UNDER_WAY)
def test_refused_is_final_though_retries_are_left(status: Status) -> None:
    row = make_row(outcome="refused", push="refused")
    after = settled(under_way(row, status=status), row)
    assert (after.status, after.push, after.error) == ("failed", "refused", row.error)


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("cancel_requested", [False, True])
def test_a_success_that_came_after_the_timeout_but_before_the_task_was_settled_counts(
    status: Status, cancel_requested: bool
) -> None:
    row = make_row(outcome="timeout", late_success=True)
    assert settled(under_way(row, status=status, cancel_requested=cancel_requested), row).status == "success"


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("cancel_requested", [False, True])
def test_a_forced_release_fails_the_task_and_is_not_retried(status: Status, cancel_requested: bool) -> None:
    row = make_row(outcome="released")
    after = settled(under_way(row, status=status, cancel_requested=cancel_requested), row)
    assert after.status == "failed"
    assert after.error is not None
    assert after.error.code == "LOCK_RELEASED"


@pytest.mark.parametrize("status", UNDER_WAY)
@pytest.mark.parametrize("outcome", ["canceled", "dropped"])
def test_canceled_and_dropped_cancel_the_task(status: Status, outcome: Outcome) -> None:
    row = make_row(outcome=outcome)
    after = settled(under_way(row, status=status), row)
    assert (after.status, after.finished_at) == ("canceled", NOW)


def test_a_cancel_that_central_control_confirms_ends_with_the_users_reason() -> None:
    row = make_row(outcome="canceled", reason="central control confirms the cancel")
    asked = under_way(row, status="send_success", cancel_requested=True, cancel_reason="wrong site")
    change = lifecycle.settle(asked, row, NOW, 0.5)
    assert change is not None
    assert change.set["error"] == Error(code="CANCELED", message="wrong site")
    assert change.history is not None
    assert change.history.reason == "central control confirms the cancel"
    dropped = make_row(outcome="dropped", reason="forced cancel: at once")
    assert settled(under_way(dropped, cancel_requested=True, cancel_reason="wrong site"), dropped).error.message == (
        "forced cancel: at once"
    )


def test_handed_back_from_a_first_start_restores_waiting_as_it_was() -> None:
    row = make_row(outcome="handed_back", from_status="waiting")
    after = settled(under_way(row, retry_count=0, push="not_sent"), row)
    assert (after.status, after.execution_id, after.push, after.retry_count) == ("waiting", None, None, 0)
    assert (after.next_run_at, after.queued, after.worker_id, after.error) == (NOW, True, None, None)
    assert after.attempt == row.attempt, "an attempt number is never used again"


def test_handed_back_from_a_retry_restores_its_count_execution_and_push() -> None:
    failure = Error(code="EXECUTION_FAILED", message="exit code 1")
    row = make_row(
        outcome="handed_back", from_status="failed_waiting_retry", previous_execution_id="exec-1", previous_push="sent"
    )
    after = settled(under_way(row, retry_count=2, push="not_sent", error=failure), row)
    assert (after.status, after.execution_id, after.push, after.retry_count) == ("failed_waiting_retry", "exec-1", "sent", 1)
    assert after.error == failure, "why it retries is still the failure, not the hand-back"


def test_handed_back_because_central_control_asked_to_wait_waits_that_long() -> None:
    until = NOW + timedelta(seconds=5)
    asked = Error(code="DISPATCH_FAILED", message="asked to wait 5 s", details={"retry_after_seconds": 5.0})
    row = make_row(outcome="handed_back", retry_at=until, error=asked)
    after = settled(under_way(row), row)
    assert (after.status, after.next_run_at, after.wait_code) == ("waiting", until, "central")


def test_handed_back_because_central_control_was_of_no_use_does_not_say_that_it_asked() -> None:
    row = make_row(outcome="handed_back", retry_at=NOW + timedelta(seconds=5))
    assert settled(under_way(row), row).wait_code == "central_away"


def test_handed_back_after_the_execution_before_it_succeeded_late_is_a_success() -> None:
    row = make_row(
        outcome="handed_back", from_status="failed_waiting_retry", previous_execution_id="exec-1", previous_push="sent"
    )
    after = settled(under_way(row, retry_count=2, late_success_of="exec-1"), row)
    assert after.status == "success"
    assert (after.execution_id, after.push, after.retry_count) == ("exec-1", "sent", 1), "the latest not handed back"


def test_a_late_success_of_an_execution_further_back_does_not_end_a_hand_back() -> None:
    row = make_row(outcome="handed_back", from_status="failed_waiting_retry", previous_execution_id="exec-1")
    assert settled(under_way(row, late_success_of="exec-0"), row).status == "failed_waiting_retry"


@pytest.mark.parametrize(("retry_count", "becomes"), [(1, "failed_waiting_retry"), (3, "failed")])
def test_handed_back_after_it_was_said_to_be_sent_costs_like_a_failure(retry_count: int, becomes: Status) -> None:
    row = make_row(outcome="handed_back", from_status="failed_waiting_retry", previous_execution_id="exec-1")
    after = settled(under_way(row, status="send_success", retry_count=retry_count, late_success_of="exec-1"), row)
    assert (after.status, after.retry_count, after.execution_id) == (becomes, retry_count, row.id)


@pytest.mark.parametrize("code", ["EXECUTION_FAILED", "TIMEOUT"])
def test_a_message_that_says_not_retryable_is_final(code: str) -> None:
    row = make_row(outcome="failed", error=Error(code=code, message="no"), retryable=False)
    assert settled(under_way(row), row).status == "failed"


@pytest.mark.parametrize("code", ["DEVICE_NOT_FOUND", "INTERNAL_ERROR"])
def test_an_error_that_a_retry_cannot_mend_is_final(code: str) -> None:
    row = make_row(outcome="failed", error=Error(code=code, message="no"))
    assert settled(under_way(row), row).status == "failed"


# ------------------------------------------------------------------------------- the whole table, against the code


rows = st.builds(
    make_row,
    outcome=st.sampled_from(OUTCOMES),
    late_success=st.booleans(),
    from_status=st.sampled_from(["waiting", "failed_waiting_retry"]),
    previous_execution_id=st.sampled_from([None, "exec-1"]),
    push=st.sampled_from(["not_sent", "sent", "unknown", "refused"]),
    sending_at=st.sampled_from([None, EARLIER]),
).map(lambda row: row if row.outcome == "timeout" else msgspec.structs.replace(row, late_success=False))


@given(
    rows,
    st.sampled_from(UNDER_WAY),
    st.booleans(),
    st.sampled_from([None, "exec-0", "exec-1"]),
    st.integers(0, 3),
    st.data(),
)
def test_settle_is_the_table(
    row: Execution, status: Status, cancel: bool, late_of: str | None, left: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(row.from_status == "failed_waiting_retry", 3))
    task = under_way(
        row,
        status=status,
        cancel_requested=cancel,
        late_success_of=late_of,
        retry_count=count,
        retry=Retry(max_retries=count + left),
    )
    after = settled(task, row)
    assert after.status == restated(task, row)
    assert after.status in lifecycle.TRANSITIONS[status]
    assert after.attempt == task.attempt
    if after.status in ("success", "failed", "canceled"):
        assert (after.finished_at, after.next_run_at, after.queued) == (NOW, None, False)
    else:
        assert after.next_run_at is not None
        assert after.next_run_at >= NOW
        assert after.queued


@given(rows, st.sampled_from(UNDER_WAY), st.sampled_from(["cancel_requested", "late_success_of", "execution_id", "status"]))
def test_settle_compares_all_that_it_looked_at(row: Execution, status: Status, field: str) -> None:
    """Lost means that one of them changed: read again, decide again."""
    task = under_way(row, status=status)
    change = lifecycle.settle(task, row, NOW, 0.0)
    assert change is not None
    assert change.expect[field] == getattr(task, field)


@given(rows, st.sampled_from([status for status in STATUSES if status not in UNDER_WAY]))
def test_a_task_that_is_not_under_way_is_left_alone(row: Execution, status: Status) -> None:
    assert lifecycle.settle(under_way(row, status=status), row, NOW, 0.0) is None


@given(rows, st.sampled_from(UNDER_WAY))
def test_a_task_that_runs_another_execution_is_left_alone(row: Execution, status: Status) -> None:
    assert lifecycle.settle(under_way(row, status=status, execution_id="exec-3"), row, NOW, 0.0) is None


def test_an_open_row_settles_nothing() -> None:
    row = make_row()
    assert lifecycle.settle(under_way(row), row, NOW, 0.0) is None


# ------------------------------------------------------------------------------------------------ C3, late success


def late_row(**values: object) -> Execution:
    return make_row(**{"outcome": "timeout", "late_success": True, "push": "sent", "result": {"ok": True}, **values})


@pytest.mark.parametrize("status", ["failed_waiting_retry", "paused"])
def test_a_late_success_of_the_latest_execution_ends_a_task_that_waits_for_its_retry(status: Status) -> None:
    row = late_row()
    task = under_way(row, status=status, next_run_at=NOW + timedelta(minutes=1), error=row.error)
    change = lifecycle.settle_late(task, row, NOW)
    assert change is not None
    after = applied(task, change)
    assert (after.status, after.result, after.error, after.next_run_at) == ("success", {"ok": True}, None, None)
    assert change.expect["status"] == status
    assert change.expect["execution_id"] == row.id


def test_a_late_success_is_noted_on_a_task_whose_next_execution_has_begun() -> None:
    row = late_row(id="exec-1")
    task = under_way(row, execution_id="exec-2")
    change = lifecycle.settle_late(task, row, NOW)
    assert change is not None
    after = applied(task, change)
    assert (after.status, after.late_success_of, after.execution_id) == ("running", "exec-1", "exec-2")
    assert change.expect["execution_id"] == "exec-2"
    assert lifecycle.settle_late(after, row, NOW) is None, "once is enough: repeated until nothing is to do"


def test_a_late_success_of_an_older_execution_does_not_hide_that_of_a_newer_one() -> None:
    task = under_way(make_row(id="exec-3"), late_success_of="exec-2")
    assert lifecycle.settle_late(task, late_row(id="exec-1"), NOW) is None
    newer = lifecycle.settle_late(under_way(make_row(id="exec-3"), late_success_of="exec-1"), late_row(id="exec-2"), NOW)
    assert newer is not None
    assert newer.set["late_success_of"] == "exec-2"


@pytest.mark.parametrize("status", ["failed_waiting_retry", "paused", "waiting", "send_success"])
def test_a_late_success_of_an_older_execution_does_not_touch_the_task(status: Status) -> None:
    row = late_row(id="exec-1")
    assert lifecycle.settle_late(under_way(row, status=status, execution_id="exec-2"), row, NOW) is None


@pytest.mark.parametrize("status", ["success", "failed", "canceled"])
def test_a_late_success_never_changes_a_final_task(status: Status) -> None:
    row = late_row()
    assert lifecycle.settle_late(under_way(row, status=status), row, NOW) is None


def test_a_late_success_of_an_earlier_round_is_not_noted() -> None:
    row = late_row(id="exec-1", round=1)
    assert lifecycle.settle_late(under_way(row, execution_id="exec-2", round=2), row, NOW) is None


def test_a_row_without_a_late_success_notes_nothing() -> None:
    row = make_row(outcome="timeout")
    assert lifecycle.settle_late(under_way(row, status="failed_waiting_retry"), row, NOW) is None


# --------------------------------------------------------------------------------------- without reading the task


def sent_and_succeeded(**values: object) -> Execution:
    return make_row(outcome="success", attempt=1, push="sent", sent_at=EARLIER, result={"n": 1}, **values)


@given(
    status=st.sampled_from(STATUSES),
    execution_id=st.sampled_from(["exec-2", "exec-1", None]),
    cancel_requested=st.booleans(),
    late_success_of=st.sampled_from([None, "exec-0"]),
    retry_count=st.integers(0, 2),
    kind=st.sampled_from(["script", "other"]),
)
def test_what_is_presumed_of_a_task_is_all_that_its_settling_depends_on(status: Status, kind: str, **values: object) -> None:
    """Wherever the presumed change would be applied it is the one that reading the task would have led to."""
    row = sent_and_succeeded()
    task = make_task(status=status, type=kind, attempt=1, push="sent", next_run_at=None, **values)
    presumed = lifecycle.settle_presumed(row, NOW)
    assert presumed is not None
    _, change = presumed
    if not holds(task, change.expect):
        return
    read = lifecycle.settle(task, row, NOW, 0.0)
    assert read is not None
    assert (change.set, change.history) == (read.set, read.history)
    assert status == "send_success"


def test_the_usual_task_is_settled_as_presumed() -> None:
    row = sent_and_succeeded()
    task = under_way(row, status="send_success", push="sent", retry_count=0)
    _, change = lifecycle.settle_presumed(row, NOW) or pytest.fail("it has to be read")
    assert applied(task, change).status == "success"


def test_nothing_is_presumed_of_a_retry_a_failure_or_a_result_that_overtook_its_worker() -> None:
    assert lifecycle.settle_presumed(make_row(outcome="success", attempt=2, sent_at=EARLIER), NOW) is None
    assert lifecycle.settle_presumed(make_row(outcome="failed", attempt=1, sent_at=EARLIER), NOW) is None
    assert lifecycle.settle_presumed(make_row(outcome="success", attempt=1, sent_at=None), NOW) is None
