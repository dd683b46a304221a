"""`GET /stats`: how it goes, now and over the last hour or a given day. Counted by the store; kept for a second."""

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import Any

from scriptdispatch.domain.model import STATUSES
from scriptdispatch.services.fields import format_time
from scriptdispatch.store.port import Stats
from scriptdispatch.wiring import Backends

FRESH_S = 1.0
HOUR = timedelta(hours=1)


class StatsDesk:
    """Several who ask within a second get one answer, so a page that many look at costs one question a second."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._kept: dict[date | None, tuple[float, dict[str, Any]]] = {}
        self._asking = asyncio.Lock()

    async def view(self, day: date | None) -> dict[str, Any]:
        async with self._asking:
            now = self._backends.clock.uptime()
            self._kept = {key: kept for key, kept in self._kept.items() if now - kept[0] < FRESH_S}
            if day not in self._kept:
                self._kept[day] = (now, await self._count(day))
            return self._kept[day][1]

    async def _count(self, day: date | None) -> dict[str, Any]:
        now = self._backends.clock.now()
        since, until = span(day, now)
        counts, ready, oldest, stats = await asyncio.gather(
            self._backends.store.counts(),
            self._backends.queue.ready(),
            self._backends.store.oldest_due(),
            self._backends.store.stats(since, until),
        )
        return {
            "counts": {status: counts.get(status, 0) for status in STATUSES},
            "ready": {priority: ready.get(priority, 0) for priority in ("high", "normal", "low")},
            "oldest_waiting_seconds": 0.0 if oldest is None else max(0.0, round((now - oldest).total_seconds(), 3)),
            **_span_view(stats, since, until),
        }


def span(day: date | None, now: datetime) -> tuple[datetime, datetime]:
    """The day asked for (UTC), or the last hour in whole minutes."""
    if day is not None:
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        return start, start + timedelta(days=1)
    return (now - HOUR).replace(second=0, microsecond=0), now


def _span_view(stats: Stats, since: datetime, until: datetime) -> dict[str, Any]:
    succeeded, failed = stats.finished.get("success", 0), stats.finished.get("failed", 0)
    ended = succeeded + failed
    seconds = max(1.0, (until - since).total_seconds())
    return {
        "since": format_time(since),
        "until": format_time(until),
        "finished": stats.finished,
        "failure_rate": round(failed / ended, 6) if ended else 0.0,
        "throughput": round(sum(stats.finished.values()) / seconds, 6),
        "errors": stats.errors,
        "duration_ms": _percentiles(stats.duration_ms),
        "wait_ms": _percentiles(stats.wait_ms),
        "push_ms": _percentiles(stats.push_ms),
        "run_ms": _percentiles(stats.run_ms),
        "per_minute": [
            {"at": format_time(minute), "succeeded": good, "failed": bad} for minute, good, bad in stats.per_minute
        ],
    }


def _percentiles(pair: tuple[int | None, int | None]) -> dict[str, int | None]:
    return {"p50": pair[0], "p95": pair[1]}
