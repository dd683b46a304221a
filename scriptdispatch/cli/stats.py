"""`stats`: how many, how old, how fast."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from scriptdispatch.cli.session import Session, command
from scriptdispatch.cli.times import short_span, span_ms

_BARS = "▁▂▃▄▅▆▇█"


def register(app: typer.Typer) -> None:
    @command(app, "stats")
    def stats(
        session: Session,
        day: Annotated[str | None, typer.Option("--day", help="A day, YYYY-MM-DD; the last hours unless given.")] = None,
    ) -> None:
        """Counts, failure rate, throughput and the three clocks (wait, push, run)."""
        found = session.client.stats(day)
        if session.screen.json:
            session.screen.document(found)
            return
        for line in sentences(found):
            session.screen.line(line)


def sentences(found: dict[str, Any]) -> list[str]:
    return [_counts(found), _speed(found)]


def _counts(found: dict[str, Any]) -> str:
    counts = found.get("counts") or {}
    oldest = found.get("oldest_waiting_seconds")
    parts = [f"waiting {counts.get('waiting', 0):,}" + (f" (oldest {short_span(oldest)})" if oldest else "")]
    parts += [f"running {counts.get('running', 0):,}", f"sent {counts.get('send_success', 0):,}"]
    parts += [f"will retry {counts.get('failed_waiting_retry', 0):,}"]
    done = {name: counts.get(name, 0) for name in ("success", "failed", "canceled")}
    parts += [f"{name} {count:,}" for name, count in done.items()]
    rate = found.get("failure_rate")
    if rate is not None and any(found.get("finished", {}).values()):
        parts.append(f"{100 * (1 - rate):.1f} % succeed")
    return " · ".join(parts)


def _speed(found: dict[str, Any]) -> str:
    parts = []
    minutes = [_finished(row) for row in found.get("per_minute") or []]
    if minutes:
        parts.append(f"finished/min {sparkline(minutes[-30:])} {minutes[-1]:,}")
    for name, key in (("wait", "wait_ms"), ("push", "push_ms"), ("run", "run_ms"), ("took", "duration_ms")):
        if (spans := _pair(found.get(key))) is not None:
            parts.append(f"{name} {span_ms(spans[0])}/{span_ms(spans[1])}")
    return "  ".join(parts) if parts else "nothing has finished yet"


def sparkline(values: Sequence[int]) -> str:
    """Bars of the values against their highest."""
    top = max([*values, 1])
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)


def _finished(row: dict[str, Any]) -> int:
    return int(row.get("succeeded") or 0) + int(row.get("failed") or 0)


def _pair(value: Any) -> tuple[Any, Any] | None:
    """p50 and p95, if there is anything to take them from."""
    if not isinstance(value, dict) or value.get("p50") is None:
        return None
    return value["p50"], value.get("p95")
