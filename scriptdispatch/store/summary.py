"""What every store does alike: its limits, percentiles, and the shape of `Stats`. Pure."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from scriptdispatch.store.port import Stats

HISTORY_KEPT: Final = 500  # rows per task
NEWEST: Final = 10_000  # percentiles look at this many
MINUTE_MS: Final = 60_000
Pair = tuple[int | None, int | None]


def percentiles(values: Iterable[int | None]) -> Pair:
    """p50 and p95 by nearest rank; those that are None do not count."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return (None, None)
    return (known[_rank(len(known), 50)], known[_rank(len(known), 95)])


def _rank(count: int, percent: int) -> int:
    return max(0, -(-count * percent // 100) - 1)


def build_stats(
    ended: Iterable[tuple[datetime, str, str | None, int]],
    phases: Sequence[tuple[int | None, int | None, int | None]],
    durations: Iterable[int | None],
) -> Stats:
    """`ended`: (minute, status, error code, how many); `phases`: (wait, push, run) of the newest executions."""
    finished: dict[str, int] = {}
    errors: dict[str, int] = {}
    minutes: dict[datetime, list[int]] = {}
    for minute, status, code, count in ended:
        finished[status] = finished.get(status, 0) + count
        if code is not None:
            errors[code] = errors.get(code, 0) + count
        bars = minutes.setdefault(minute, [0, 0])
        if status in ("success", "failed"):
            bars[status == "failed"] += count
    return Stats(
        finished=finished,
        per_minute=[(minute, good, bad) for minute, (good, bad) in sorted(minutes.items())],
        errors=errors,
        wait_ms=percentiles(wait for wait, _, _ in phases),
        push_ms=percentiles(push for _, push, _ in phases),
        run_ms=percentiles(run for _, _, run in phases),
        duration_ms=percentiles(durations),
    )
