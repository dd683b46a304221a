"""`waiting_for`: each reason with its sentence, and that the first obstacle in order is the one that is named."""

from datetime import datetime, timedelta

import pytest

from scriptdispatch.domain.model import STATUSES, Breaker, Error, Retry, Status
from scriptdispatch.domain.waiting import Facts, in_words, ordinal, waiting_for
from tests.unit.domain_values import EARLIER, NOW, make_row, make_task

LATER = NOW + timedelta(seconds=95)
FREE = Facts(workers=2, free=10)
HOLDER = "01990000-0000-7000-8000-00000000beef"


def test_a_task_whose_time_has_not_come_says_when_it_starts() -> None:
    told = waiting_for(make_task(next_run_at=LATER), None, FREE, NOW)
    assert told is not None
    assert (told.reason, told.until, told.since) == ("due_time", LATER, EARLIER)
    assert told.message == "Starts at 2026-11-18 12:01:35 UTC (in 1 m 35 s)."


def test_a_task_that_waits_for_its_retry_says_what_failed_and_which_retry_comes() -> None:
    error = Error(code="EXECUTION_FAILED", message="exit code 1")
    task = make_task(
        status="failed_waiting_retry", next_run_at=LATER, attempt=2, retry_count=1, error=error, execution_id="exec-2"
    )
    told = waiting_for(task, None, FREE, NOW)
    assert told is not None
    assert (told.reason, told.until) == ("retry", LATER)
    assert told.message == (
        "Attempt 2 failed: EXECUTION_FAILED. Tries again at 2026-11-18 12:01:35 UTC (in 1 m 35 s), retry 2 of 3."
    )
    assert told.details == {"attempt": 2, "code": "EXECUTION_FAILED", "retry": 2}


def test_a_retry_without_a_last_one_names_no_number_of_retries() -> None:
    task = make_task(status="failed_waiting_retry", next_run_at=LATER, retry=Retry(strategy="forever"))
    told = waiting_for(task, None, FREE, NOW)
    assert told is not None
    assert told.message.endswith("retry 1.")


def test_a_task_that_central_control_asked_to_wait_says_so_and_that_nothing_is_charged() -> None:
    told = waiting_for(make_task(next_run_at=LATER, wait_code="central"), None, FREE, NOW)
    assert told is not None
    assert (told.reason, told.until) == ("central", LATER)
    assert told.message == "Central control asked to wait until 2026-11-18 12:01:35 UTC (in 1 m 35 s). No retry is charged."


def test_a_task_handed_back_by_a_central_control_that_is_away_does_not_say_that_it_asked() -> None:
    task = make_task(next_run_at=LATER, wait_code="central_away")
    told = waiting_for(task, None, FREE, NOW)
    assert told is not None
    assert (told.reason, told.until) == ("central", LATER)
    assert told.message == (
        "Central control does not answer, or the settings for it are wrong. "
        "Tries again at 2026-11-18 12:01:35 UTC (in 1 m 35 s). No retry is charged."
    )
    breaker = Breaker(open=True, since=EARLIER, reason="HTTP 401", probe_at=LATER)
    told = waiting_for(task, None, Facts(breaker=breaker), NOW)
    assert told is not None
    assert told.message.startswith("Central control does not answer since 2026-11-18 11:55:00 UTC (HTTP 401).")


def test_while_the_breaker_is_open_everything_due_waits_for_central_control() -> None:
    breaker = Breaker(open=True, since=EARLIER, reason="connection refused", probe_at=LATER)
    told = waiting_for(make_task(), None, Facts(breaker=breaker, workers=1, free=1), NOW)
    assert told is not None
    assert (told.reason, told.since, told.until) == ("central", EARLIER, LATER)
    assert told.message == (
        "Central control does not answer since 2026-11-18 11:55:00 UTC (connection refused). "
        "No retry is charged; next try 2026-11-18 12:01:35 UTC."
    )


def test_while_the_locks_are_restored_a_task_with_a_device_waits_for_them() -> None:
    facts = Facts(lock_service=False, workers=1, free=1)
    told = waiting_for(make_task(), None, facts, NOW)
    assert told is not None
    assert told.reason == "lock_service"
    assert waiting_for(make_task(device_id=None), None, facts, NOW) is None


def test_a_task_behind_another_names_it_and_its_place_in_the_lane() -> None:
    facts = Facts(position=2, holder=HOLDER, holder_task_id="task-of-12345678", holder_since=EARLIER, workers=1, free=1)
    told = waiting_for(make_task(), None, facts, NOW)
    assert told is not None
    assert (told.reason, told.position, told.task_id) == ("device", 2, "task-of-12345678")
    assert told.message == "2nd in the lane of dev-001; …12345678 has had the device for 5 m 00 s."


def test_a_device_that_somebody_else_has_locked_is_named_with_the_lock_value() -> None:
    told = waiting_for(make_task(), None, Facts(position=1, holder="maintenance by jo", workers=1, free=1), NOW)
    assert told is not None
    assert told.message == "1st in the lane of dev-001; its lock is held by 'maintenance by jo'."


def test_a_task_that_is_not_first_waits_for_the_device_also_while_it_is_free() -> None:
    told = waiting_for(make_task(), None, Facts(position=3, workers=1, free=1), NOW)
    assert told is not None
    assert told.message == "3rd in the lane of dev-001; another task goes first."


def test_without_any_worker_it_says_how_to_start_one() -> None:
    told = waiting_for(make_task(), None, Facts(position=1), NOW)
    assert told is not None
    assert told.reason == "worker"
    assert "scriptdispatch serve" in told.message


def test_full_workers_are_counted() -> None:
    told = waiting_for(make_task(), None, Facts(position=1, workers=3, free=0), NOW)
    assert told is not None
    assert (told.reason, told.message) == ("worker", "All 3 workers are full.")


def test_a_pushed_task_waits_for_its_result_until_the_deadline() -> None:
    row = make_row(sending_at=EARLIER, sent_at=EARLIER, deadline_at=LATER, push="sent")
    told = waiting_for(make_task(status="send_success", push="sent", next_run_at=None), row, FREE, NOW)
    assert told is not None
    assert (told.reason, told.since, told.until) == ("result", EARLIER, LATER)
    assert told.message == "On the device for 5 m 00 s; waits for its result, at the latest until 2026-11-18 12:01:35 UTC."


def test_an_unclear_push_is_said_to_be_unclear_and_not_repeated() -> None:
    row = make_row(sending_at=EARLIER, deadline_at=LATER, push="unknown")
    told = waiting_for(make_task(status="send_success", push="unknown", next_run_at=None), row, FREE, NOW)
    assert told is not None
    assert told.message.startswith("The push was unclear and is not repeated; waits for a result, at the latest until")


def test_a_requested_cancel_says_since_when_central_control_is_asked() -> None:
    task = make_task(
        status="send_success", push="sent", next_run_at=None, cancel_requested=True, cancel_requested_at=EARLIER
    )
    told = waiting_for(task, make_row(sent_at=EARLIER, deadline_at=LATER), FREE, NOW)
    assert told is not None
    assert told.message.startswith("Cancel asked 5 m 00 s ago; waits for central control")


def test_a_paused_task_says_that_a_user_paused_it() -> None:
    told = waiting_for(make_task(status="paused", next_run_at=LATER), None, FREE, NOW)
    assert told is not None
    assert told.reason == "paused"


@pytest.mark.parametrize("status", [status for status in STATUSES if status in ("running", "success", "failed", "canceled")])
def test_what_runs_or_is_final_waits_for_nothing(status: Status) -> None:
    assert waiting_for(make_task(status=status, next_run_at=None), None, Facts(), NOW) is None


def test_a_task_in_the_hands_of_a_worker_waits_for_nothing() -> None:
    assert waiting_for(make_task(), None, Facts(leased=True, holder=HOLDER), NOW) is None


def test_a_free_device_and_a_free_worker_leave_nothing_to_wait_for() -> None:
    assert waiting_for(make_task(), None, Facts(position=1, workers=1, free=1), NOW) is None


def test_the_first_obstacle_is_named_when_there_are_many() -> None:
    """Time, central control, lock service, device, worker: taken away one by one, the next one shows."""
    obstacles = {"breaker": Breaker(open=True), "lock_service": False, "holder": HOLDER, "workers": 0}
    gone = {"breaker": Breaker(), "lock_service": True, "holder": None, "workers": 1}

    def reason(next_run_at: datetime) -> str | None:
        told = waiting_for(make_task(next_run_at=next_run_at), None, Facts(**obstacles, free=1), NOW)  # type: ignore[arg-type]
        return told and told.reason

    seen = [reason(LATER)]
    for name in list(obstacles):
        seen.append(reason(EARLIER))
        obstacles[name] = gone[name]
    assert [*seen, reason(EARLIER)] == ["due_time", "central", "lock_service", "device", "worker", None]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 ms"),
        (0.25, "250 ms"),
        (3.14, "3.1 s"),
        (59.9, "59 s"),
        (61, "1 m 01 s"),
        (3600, "1 h 00 m"),
        (200_000, "2 d"),
    ],
)
def test_spans_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(
    ("n", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"), (112, "112th")],
)
def test_places_in_words(n: int, word: str) -> None:
    assert ordinal(n) == word
