from scriptdispatch.central.breaker import OPENS_AFTER, Breaker
from scriptdispatch.central.outcomes import PushAnswer

UNREACHABLE = PushAnswer(outcome="not_sent", message="connection refused", connect_failed=True)
TAKEN = PushAnswer(outcome="taken", message="taken", http_status=202)


def test_it_opens_with_the_fifth_connect_failure_in_a_row_and_says_why() -> None:
    breaker = Breaker()
    opened = [breaker.note(UNREACHABLE) for _ in range(OPENS_AFTER)]
    assert opened == [False, False, False, False, True]
    assert breaker.open
    assert "connection refused" in (breaker.reason or "")


def test_only_the_answer_that_opens_it_says_so() -> None:
    breaker = Breaker()
    for _ in range(OPENS_AFTER):
        breaker.note(UNREACHABLE)
    assert breaker.note(UNREACHABLE) is False
    assert breaker.open


def test_any_answer_in_between_starts_the_count_again() -> None:
    for answer in (
        TAKEN,
        PushAnswer(outcome="refused", message="422", http_status=422),
        PushAnswer(outcome="unknown", message="500", http_status=500),
    ):
        breaker = Breaker()
        for _ in range(OPENS_AFTER - 1):
            breaker.note(UNREACHABLE)
        breaker.note(answer)
        for _ in range(OPENS_AFTER - 1):
            breaker.note(UNREACHABLE)
        assert not breaker.open


def test_a_push_that_broke_off_or_was_vetoed_neither_counts_nor_resets() -> None:
    breaker = Breaker()
    for _ in range(OPENS_AFTER - 1):
        breaker.note(UNREACHABLE)
        breaker.note(PushAnswer(outcome="unknown", message="reset"))
        breaker.note(PushAnswer(outcome="not_sent", message="vetoed"))
    assert not breaker.open
    assert breaker.note(UNREACHABLE) is True


def test_misconfigured_opens_it_at_once() -> None:
    breaker = Breaker()
    assert breaker.note(PushAnswer(outcome="misconfigured", message="certificate has expired")) is True
    assert breaker.reason == "certificate has expired"


def test_an_open_breaker_closes_only_when_told_and_then_counts_from_nothing() -> None:
    breaker = Breaker()
    for _ in range(OPENS_AFTER):
        breaker.note(UNREACHABLE)
    breaker.note(TAKEN)
    assert breaker.open
    breaker.close()
    assert not breaker.open
    assert breaker.reason is None
    assert [breaker.note(UNREACHABLE) for _ in range(OPENS_AFTER - 1)] == [False] * (OPENS_AFTER - 1)
