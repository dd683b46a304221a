"""When a failed task tries again (SPEC 9). `chance` is a number in [0, 1) that the caller draws for the jitter."""

from datetime import datetime, timedelta

from scriptdispatch.domain.model import Retry

JITTER = 0.2


def retries_left(retry: Retry, retry_count: int) -> bool:
    return retry.strategy in ("daily", "forever") or retry_count < retry.max_retries


def retry_at(retry: Retry, n: int, failed_at: datetime, first_failed_at: datetime, chance: float) -> datetime:
    """The time of retry `n` (1-based) after the failure at `failed_at`; the round's first was at `first_failed_at`."""
    if retry.strategy == "daily":
        return _daily(retry, n, failed_at, first_failed_at, chance)
    return failed_at + _spread(retry, timedelta(seconds=delay_s(retry, n)), chance)


def delay_s(retry: Retry, n: int) -> float:
    """The delay before retry `n`, without jitter. For `daily` the delay within a day."""
    if retry.strategy in ("fixed", "daily"):
        return retry.delay_seconds
    if retry.strategy == "fixed_then_exponential":
        if n <= 3:
            return retry.delay_seconds
        n -= 2  # retry 4 waits delay × rate^1
    return _grown(retry, n - 1)


def _grown(retry: Retry, power: int) -> float:
    try:
        grown = retry.delay_seconds * retry.backoff_rate**power
    except OverflowError:
        grown = retry.max_delay_seconds
    return min(grown, retry.max_delay_seconds)


def _daily(retry: Retry, n: int, failed_at: datetime, first_failed_at: datetime, chance: float) -> datetime:
    day, place = divmod(n - 1, retry.per_day)
    soon = failed_at + _spread(retry, timedelta(seconds=retry.delay_seconds), chance)
    if place:
        return soon
    next_day = first_failed_at + timedelta(days=day)
    return max(next_day, failed_at) if day else soon


def _spread(retry: Retry, delay: timedelta, chance: float) -> timedelta:
    if not retry.jitter or retry.strategy == "fixed":
        return delay
    return delay * (1 + JITTER * chance)
