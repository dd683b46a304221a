"""Times and spans as people type and read them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def parse_span(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1.5h`, `30d`. Raises ValueError that says what is taken."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a span of time: write 90s, 5m, 2h or 30d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def parse_when(text: str, now: datetime) -> datetime:
    """A time: RFC 3339, or without an offset in local time, or `+5m` from now."""
    if text.startswith("+"):
        return now + timedelta(seconds=parse_span(text[1:]))
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: write 2026-11-18T22:00:00+08:00, '2026-11-18 22:00' or +5m") from None


def read(value: Any) -> datetime | None:
    """A time of the API."""
    return datetime.fromisoformat(value) if isinstance(value, str) and value else None


def rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(value: Any, *, utc: bool) -> str:
    """Local with its offset, to the second."""
    at = read(value)
    if at is None:
        return "–"
    return at.astimezone(UTC if utc else None).strftime("%Y-%m-%d %H:%M:%S %z")


def age(value: Any, now: datetime) -> str:
    """How long ago, for a table: 41 s, 2 m, 3 h, 5 d."""
    at = read(value)
    return "–" if at is None else short_span((now - at).total_seconds())


def short_span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= (2 if unit == "d" else 1) * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def span_ms(ms: Any) -> str:
    """A measured span: 95 ms, 4.0 s, 1 m 12 s, 3 h 04 m."""
    from scriptdispatch.domain.waiting import in_words

    return "–" if ms is None else in_words(float(ms) / 1000)
