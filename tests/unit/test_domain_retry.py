from datetime import timedelta
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain.model import Retry, Strategy
from scriptdispatch.domain.retry import delay_s, retries_left, retry_at
from tests.unit.domain_values import NOW

DAY = timedelta(days=1)


def policies(**fixed: st.SearchStrategy[object]) -> st.SearchStrategy[Retry]:
    fields: dict[str, st.SearchStrategy[object]] = {
        "strategy": st.sampled_from(get_args(Strategy)),
        "max_retries": st.integers(0, 1000),
        "delay_seconds": st.floats(0, 86_400),
        "backoff_rate": st.floats(1, 100),
        "max_delay_seconds": st.floats(1, 86_400),
        "per_day": st.integers(1, 1000),
        "jitter": st.booleans(),
    }
    return st.builds(Retry, **{**fields, **fixed})  # type: ignore[arg-type]


chances = st.floats(0, 1, exclude_max=True)


def delays(retry: Retry, count: int) -> list[float]:
    return [delay_s(retry, n) for n in range(1, count + 1)]


def test_fixed_waits_the_same_each_time() -> None:
    assert delays(Retry(strategy="fixed", delay_seconds=7), 5) == [7, 7, 7, 7, 7]


def test_exponential_multiplies_from_the_second_retry_on_up_to_the_cap() -> None:
    retry = Retry(strategy="exponential", delay_seconds=10, backoff_rate=3, max_delay_seconds=100)
    assert delays(retry, 5) == [10, 30, 90, 100, 100]


def test_fixed_then_exponential_is_fixed_three_times_then_multiplies() -> None:
    retry = Retry(strategy="fixed_then_exponential", delay_seconds=10, backoff_rate=2, max_delay_seconds=50)
    assert delays(retry, 7) == [10, 10, 10, 20, 40, 50, 50]


def test_forever_waits_like_exponential() -> None:
    retry = Retry(strategy="exponential", delay_seconds=1, backoff_rate=2, max_delay_seconds=60)
    forever = Retry(strategy="forever", delay_seconds=1, backoff_rate=2, max_delay_seconds=60)
    assert delays(forever, 12) == delays(retry, 12)


def test_a_power_beyond_all_floats_is_just_the_cap() -> None:
    retry = Retry(strategy="forever", delay_seconds=10, backoff_rate=100, max_delay_seconds=3600)
    assert delay_s(retry, 1_000_000) == 3600


def test_daily_tries_per_day_times_then_a_day_after_the_first_failure() -> None:
    """The pattern of two days and the first of the third, each attempt failing at once."""
    retry = Retry(strategy="daily", delay_seconds=60, per_day=3, jitter=False)
    minute = timedelta(seconds=60)
    failed_at, times = NOW, []
    for n in range(1, 8):
        failed_at = retry_at(retry, n, failed_at, NOW, 0.0)
        times.append(failed_at - NOW)
    assert times == [minute, 2 * minute, 3 * minute, DAY, DAY + minute, DAY + 2 * minute, 2 * DAY]


def test_daily_with_one_a_day_tries_once_soon_and_then_each_day() -> None:
    retry = Retry(strategy="daily", delay_seconds=60, per_day=1, jitter=False)
    assert retry_at(retry, 1, NOW, NOW, 0.0) == NOW + timedelta(seconds=60)
    assert retry_at(retry, 2, NOW + timedelta(seconds=60), NOW, 0.0) == NOW + DAY
    assert retry_at(retry, 3, NOW + DAY, NOW, 0.0) == NOW + 2 * DAY


def test_daily_never_goes_back_in_time_when_an_attempt_took_longer_than_a_day() -> None:
    retry = Retry(strategy="daily", per_day=1, jitter=False)
    late = NOW + 3 * DAY
    assert retry_at(retry, 2, late, NOW, 0.0) == late


@pytest.mark.parametrize("strategy", ["fixed", "exponential", "fixed_then_exponential"])
def test_max_retries_is_the_last_one(strategy: Strategy) -> None:
    retry = Retry(strategy=strategy, max_retries=2)
    assert [retries_left(retry, n) for n in (0, 1, 2, 3)] == [True, True, False, False]


@pytest.mark.parametrize("strategy", ["daily", "forever"])
def test_daily_and_forever_have_no_last_one(strategy: Strategy) -> None:
    assert retries_left(Retry(strategy=strategy, max_retries=0), 10_000)


@given(policies(strategy=st.sampled_from(["exponential", "fixed_then_exponential", "forever"])), st.integers(1, 50), chances)
def test_jitter_adds_up_to_a_fifth_and_never_takes_away(retry: Retry, n: int, chance: float) -> None:
    delay = timedelta(seconds=delay_s(retry, n))
    drawn = retry_at(retry, n, NOW, NOW, chance) - NOW
    most = delay * 1.2 + timedelta(microseconds=1) if retry.jitter else delay
    assert delay <= drawn <= most


@given(policies(strategy=st.just("fixed")), st.integers(1, 50), chances)
def test_fixed_has_no_jitter_whatever_is_drawn(retry: Retry, n: int, chance: float) -> None:
    assert retry_at(retry, n, NOW, NOW, chance) == NOW + timedelta(seconds=retry.delay_seconds)


@given(policies(strategy=st.sampled_from(["exponential", "forever"])), st.integers(1, 2000))
def test_growing_delays_never_pass_the_cap_and_never_shrink(retry: Retry, n: int) -> None:
    assert delay_s(retry, n) <= retry.max_delay_seconds
    assert delay_s(retry, n) <= delay_s(retry, n + 1)


@given(policies(), st.integers(1, 200), chances)
def test_a_retry_never_lies_before_the_failure(retry: Retry, n: int, chance: float) -> None:
    assert retry_at(retry, n, NOW, NOW - timedelta(hours=30), chance) >= NOW
