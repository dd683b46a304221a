"""The constructors of changes: what each expects and writes, and that none leaves the table."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeTask
from scriptdispatch.domain.lifecycle import TRANSITIONS, IllegalTransition
from scriptdispatch.domain.model import FINAL, STATUSES, Error, Retry, Script, Status, Task
from tests.unit.domain_values import EARLIER, NOW, applied, holds, make_row, make_task

ERROR = Error(code="INTERNAL_ERROR", message="a bug", details={"traceback": "..."})

# Every constructor that moves a task by the state it was read in (settle and settle_late: test_domain_settle.py).
MOVES: dict[str, Callable[[Task], ChangeTask]] = {
    "start": lambda task: lifecycle.start(task, make_row(), NOW),
    "foreign_lock": lambda task: lifecycle.foreign_lock(task, "somebody", "worker-1", NOW, 0.5),
    "cancel_waiting": lambda task: lifecycle.cancel_waiting(task, "jo", "not needed", NOW),
    "poison": lambda task: lifecycle.poison(task, NOW, "master"),
    "internal_failure": lambda task: lifecycle.internal_failure(task, ERROR, NOW, "worker-1"),
}
ALLOWED: dict[str, set[Status]] = {
    "start": {"waiting", "failed_waiting_retry"},
    "foreign_lock": {"waiting", "failed_waiting_retry"},
    "cancel_waiting": {"waiting", "failed_waiting_retry", "paused"},
    "poison": {"waiting", "failed_waiting_retry"},
    "internal_failure": {"waiting", "failed_waiting_retry"},
}


def test_the_table_has_every_state_and_leads_nowhere_else() -> None:
    assert set(TRANSITIONS) == set(STATUSES)
    assert {to for row in TRANSITIONS.values() for to in row} <= set(STATUSES)


def test_success_never_changes_and_the_other_final_states_only_by_a_person() -> None:
    assert TRANSITIONS["success"] == {}
    for status in ("failed", "canceled"):
        assert set(TRANSITIONS[status]) == {"waiting", "success"}
        assert all("user" in why or "operator" in why for why in TRANSITIONS[status].values())


@pytest.mark.parametrize(("name", "status"), [(name, status) for name in MOVES for status in sorted(ALLOWED[name])])
@pytest.mark.parametrize("retry_count", [0, 3])
def test_a_constructor_expects_what_was_read_and_records_the_change(name: str, status: Status, retry_count: int) -> None:
    task = make_task(status=status, retry_count=retry_count, execution_id="exec-1", round=2)
    change = MOVES[name](task)
    assert change.expect["status"] == status
    assert (change.expect["execution_id"], change.expect["round"]) == ("exec-1", 2)
    after = applied(task, change)
    assert after.status in TRANSITIONS[status]
    assert after.updated_at == NOW
    assert change.history is not None
    assert (change.history.from_status, change.history.to_status, change.history.at) == (status, after.status, NOW)
    assert change.history.actor
    assert change.history.reason


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("status", sorted(FINAL))
def test_no_constructor_moves_a_final_task(name: str, status: Status) -> None:
    with pytest.raises(IllegalTransition):
        MOVES[name](make_task(status=status))


@pytest.mark.parametrize("name", MOVES)
@given(seen=st.sampled_from(STATUSES), now_is=st.sampled_from(STATUSES))
def test_a_change_made_for_one_state_does_nothing_in_another(name: str, seen: Status, now_is: Status) -> None:
    if seen not in ALLOWED[name] or seen == now_is:
        return
    assert not holds(make_task(status=now_is), MOVES[name](make_task(status=seen)).expect)


# ------------------------------------------------------------------------------------------------------- create, W4


def test_create_writes_the_first_row_of_the_history() -> None:
    script = Script(id="s", language="shell", content="true", sha256="x", created_at=NOW)
    insert = lifecycle.create(make_task(created_by="ci"), script)
    assert (insert.history.from_status, insert.history.to_status, insert.history.actor) == (None, "waiting", "ci")
    assert insert.script is script


def test_a_first_start_costs_no_retry_and_a_retry_counts_when_it_starts() -> None:
    row = make_row(attempt=4)
    first = applied(make_task(), lifecycle.start(make_task(), row, NOW))
    assert (first.retry_count, first.attempt, first.execution_id, first.push) == (0, 4, row.id, "not_sent")
    waiting = make_task(status="failed_waiting_retry", retry_count=1, first_started_at=EARLIER)
    again = applied(waiting, lifecycle.start(waiting, row, NOW))
    assert (again.retry_count, again.started_at, again.first_started_at) == (2, NOW, EARLIER)
    assert again.next_run_at is None


def test_an_item_that_was_delivered_twice_starts_once() -> None:
    task = make_task()
    one = lifecycle.start(task, make_row(id="exec-a"), NOW)
    other = lifecycle.start(task, make_row(id="exec-b"), NOW)
    assert not holds(applied(task, one), other.expect)


def test_a_start_that_was_read_before_a_hand_back_and_a_retry_is_lost() -> None:
    """State alone is not enough: the same state may have been reached again by another execution."""
    read = make_task(status="failed_waiting_retry", execution_id="exec-1", retry_count=0)
    later = make_task(status="failed_waiting_retry", execution_id="exec-2", retry_count=1)
    assert not holds(later, lifecycle.start(read, make_row(), NOW).expect)


# ---------------------------------------------------------------------------------------------------- W2, foreign lock


@pytest.mark.parametrize(
    ("status", "count", "becomes", "then"),
    [
        ("waiting", 0, "failed_waiting_retry", 0),
        ("failed_waiting_retry", 0, "failed_waiting_retry", 1),
        ("failed_waiting_retry", 1, "failed", 2),
    ],
)
def test_a_foreign_lock_costs_a_retry_and_is_final_when_none_is_left(
    status: Status, count: int, becomes: Status, then: int
) -> None:
    task = make_task(status=status, retry_count=count, retry=Retry(max_retries=2))
    after = applied(task, lifecycle.foreign_lock(task, "maintenance", "worker-1", NOW, 0.0))
    assert (after.status, after.retry_count) == (becomes, then)
    assert after.error is not None
    assert after.error.code == "DEVICE_BUSY"
    assert "maintenance" in after.error.message


def test_a_foreign_lock_with_no_retries_at_all_is_final_at_once() -> None:
    task = make_task(retry=Retry(max_retries=0))
    assert applied(task, lifecycle.foreign_lock(task, "x", "worker-1", NOW, 0.0)).status == "failed"


# ------------------------------------------------------------------------------------------------------------ W5 to W7


def test_the_stamp_is_possible_once_and_only_on_an_open_row() -> None:
    row = make_row(timeout_seconds=60)
    change = lifecycle.stamp(row, "worker-1", NOW, 30)
    stamped = applied(row, change)
    assert (stamped.sending_at, stamped.sent_by, stamped.push) == (NOW, "worker-1", "unknown")
    assert stamped.deadline_at == NOW + timedelta(seconds=90)
    assert not holds(stamped, change.expect)
    closed = applied(row, lifecycle.close_unsent(row, "canceled", NOW, closed_by="jo", reason="x"))
    assert not holds(closed, change.expect)


def test_stamp_and_cancel_compete_for_one_row_and_one_of_them_wins() -> None:
    row = make_row()
    stamp = lifecycle.stamp(row, "worker-1", NOW, 30)
    cancel = lifecycle.close_unsent(row, "canceled", NOW, closed_by="jo", reason="not needed")
    assert not holds(applied(row, stamp), cancel.expect)
    assert not holds(applied(row, cancel), stamp.expect)


def test_the_deadline_counts_from_taken() -> None:
    row = applied(make_row(timeout_seconds=60), lifecycle.stamp(make_row(timeout_seconds=60), "worker-1", EARLIER, 30))
    taken = applied(row, lifecycle.record_push(row, "sent", NOW, 30))
    assert (taken.sent_at, taken.deadline_at) == (NOW, NOW + timedelta(seconds=90))
    assert taken.push_ms == (NOW - EARLIER).total_seconds() * 1000
    unclear = applied(row, lifecycle.record_push(row, "unknown", NOW, 30))
    assert (unclear.sent_at, unclear.deadline_at) == (None, EARLIER + timedelta(seconds=90))


def test_a_push_that_was_certainly_not_taken_lasted_until_it_was_closed_and_nothing_ran() -> None:
    stamped = applied(make_row(), lifecycle.stamp(make_row(), "worker-1", EARLIER, 30))
    for push in ("not_sent", "refused"):
        end = lifecycle.close_own(stamped, "failed", NOW, worker_id="worker-1", closed_by="w", reason="busy", push=push)
        closed = applied(stamped, end)
        assert (closed.push_ms, closed.run_ms) == (300_000, None), push
    assert (make_row(outcome="handed_back").push_ms, make_row(outcome="handed_back").run_ms) == (None, None)


def test_sent_tells_the_retry_that_is_under_way() -> None:
    change = lifecycle.sent(make_task(status="running", retry_count=3), make_row(), "sent", NOW, "taken", "worker-1")
    assert change.history is not None
    assert change.history.retry_count == 3
    assert "retry_count" not in change.set, "so the changes of many tasks stay alike"


def test_sent_loses_to_a_result_that_overtook_the_worker() -> None:
    row = make_row()
    change = lifecycle.sent(make_task(), row, "sent", NOW, "taken", "worker-1")
    assert not holds(make_task(status="success", execution_id=row.id), change.expect)
    assert not holds(make_task(status="running", execution_id="exec-3"), change.expect)
    after = applied(make_task(status="running", execution_id=row.id), change)
    assert (after.status, after.push) == ("send_success", "sent")


@pytest.mark.parametrize(
    ("values", "pushing"),
    [
        ({}, False),
        ({"sending_at": NOW, "push": "unknown"}, True),
        ({"sending_at": NOW - timedelta(seconds=24.9), "push": "unknown"}, True),
        ({"sending_at": NOW - timedelta(seconds=25), "push": "unknown"}, False),
        ({"sending_at": NOW, "push": "sent"}, False),
    ],
)
def test_a_row_is_being_pushed_until_it_is_said_to_be_sent_or_25_seconds_have_passed(
    values: dict[str, object], pushing: bool
) -> None:
    assert lifecycle.being_pushed(make_row(**values), NOW) is pushing


def test_the_three_times_of_a_push_fit_together() -> None:
    """T1, U4, D1 may give up a row after the window: by then the last byte has left or never will (PROTOCOL W6)."""
    assert lifecycle.PUSH_WINDOW.total_seconds() >= lifecycle.POST_WITHIN_S + lifecycle.POST_LIMIT_S


# ------------------------------------------------------------------------------------------------------------------ K1


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("success", "success"), ("failed", "failed"), ("refused", "failed"), ("timeout", "failed"),
        ("released", "failed"), ("dropped", "canceled"), ("canceled", "canceled"), ("handed_back", "failed"),
    ],
)  # fmt: skip
def test_a_row_is_closed_once_with_the_status_of_its_outcome(outcome: str, status: str) -> None:
    row = make_row(sending_at=NOW - timedelta(seconds=2), push="unknown")
    change = lifecycle.close(row, outcome, NOW, closed_by="closer", reason="why", error=ERROR)  # type: ignore[arg-type]
    closed = applied(row, change)
    assert (closed.active, closed.outcome, closed.status, closed.finished_at) == (False, outcome, status, NOW)
    assert (closed.closed_by, closed.reason, closed.error, closed.run_ms) == ("closer", "why", ERROR, 2000)
    assert not holds(closed, change.expect)


def test_what_is_provably_unsent_is_closed_as_such_and_not_once_it_is_stamped() -> None:
    row = make_row()
    change = lifecycle.close_unsent(row, "handed_back", NOW, closed_by="master", reason="its worker died")
    assert applied(row, change).push == "not_sent"
    assert not holds(make_row(sending_at=EARLIER), change.expect)


def test_a_worker_closes_only_a_row_that_still_carries_its_own_stamp() -> None:
    row = make_row(sending_at=EARLIER, sent_by="worker-1")
    change = lifecycle.close_own(row, "failed", NOW, worker_id="worker-1", closed_by="worker-1", reason="x", error=ERROR)
    assert holds(row, change.expect)
    assert not holds(make_row(sending_at=EARLIER, sent_by="worker-2"), change.expect)


def test_giving_up_asks_for_the_stamp_that_was_read() -> None:
    row = make_row(sending_at=EARLIER)
    change = lifecycle.give_up(row, "timeout", NOW, closed_by="timeout checker", reason="deadline")
    assert holds(row, change.expect)
    assert not holds(make_row(sending_at=NOW), change.expect)


def test_a_late_success_is_noted_once_and_only_on_a_row_that_its_deadline_closed() -> None:
    row = make_row(outcome="timeout")
    change = lifecycle.note_late_success(row, result={"n": 1}, exit_code=0)
    noted = applied(row, change)
    assert (noted.late_success, noted.result, noted.exit_code, noted.outcome) == (True, {"n": 1}, 0, "timeout")
    assert not holds(noted, change.expect)
    for outcome in ("failed", "released", "canceled", "handed_back", "success"):
        assert not holds(make_row(outcome=outcome), change.expect)


# --------------------------------------------------------------------------------------------------- cancel, progress


def test_a_cancel_request_is_made_once_for_the_execution_that_was_read() -> None:
    task = make_task(status="send_success", execution_id="exec-2")
    change = lifecycle.request_cancel(task, "jo", "wrong device", NOW)
    after = applied(task, change)
    assert (after.status, after.cancel_requested, after.cancel_requested_at) == ("send_success", True, NOW)
    assert not holds(after, change.expect)
    assert not holds(make_task(status="send_success", execution_id="exec-3"), change.expect)


@pytest.mark.parametrize(("given_", "kept"), [(-5, 0), (40, 40), (250, 100)])
def test_progress_stays_between_0_and_100(given_: int, kept: int) -> None:
    task = make_task(status="running", execution_id="exec-2")
    assert applied(task, lifecycle.progress("task-1", "exec-2", given_, "unpacking", NOW)).progress == kept


@pytest.mark.parametrize("status", sorted(FINAL))
def test_progress_of_a_final_task_does_nothing(status: Status) -> None:
    change = lifecycle.progress("task-1", "exec-2", 50, None, NOW)
    assert not holds(make_task(status=status, execution_id="exec-2"), change.expect)


def test_poison_says_what_it_is() -> None:
    task = make_task()
    after = applied(task, lifecycle.poison(task, NOW, "master"))
    assert after.status == "failed"
    assert after.error is not None
    assert (after.error.code, after.error.details) == ("SYSTEM_ERROR", {"poison": True})
    assert "3 times in a row" in after.error.message


def test_a_late_note_is_written_whatever_the_state_and_changes_none() -> None:
    change = lifecycle.late_note("task-1", make_row(outcome="released"), "SUCCESS", NOW)
    for status in STATUSES:
        assert applied(make_task(status=status), change).status == status
    assert change.history is not None
    assert change.history.kind == "INFO"
