"""Checks that API, CLI and console share on the fields people send: times, names, texts. Pure."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from scriptdispatch.errors import Refused

_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def parse_time(text: str) -> datetime:
    """RFC 3339 with an offset, as aware UTC cut to milliseconds. ValueError says what is wrong."""
    if not _RFC3339.fullmatch(text):
        raise ValueError("must be a time with an offset, such as 2026-11-18T22:00:00+08:00 or 2026-11-18T14:00:00Z")
    head, fraction = (text[:19], text[19:])
    digits = re.match(r"\.\d+", fraction)
    if digits:  # fromisoformat takes 3 or 6 digits only
        fraction = digits.group()[:7].ljust(7, "0") + fraction[digits.end() :]
    try:
        at = datetime.fromisoformat(head + fraction.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("is not a time that exists") from None
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def format_time(at: datetime | None) -> str | None:
    """RFC 3339 in UTC with milliseconds and Z."""
    if at is None:
        return None
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def plain(text: str) -> str:
    """A text that fits on one line of a table or log: ValueError if it has control characters."""
    if _CONTROL.search(text):
        raise ValueError("must not contain control characters")
    return text


def field_errors(rows: Iterable[Any]) -> list[tuple[str, str]]:
    """pydantic's errors as (JSON path, sentence); `extra_forbidden` becomes a sentence about the field."""
    found = []
    for row in rows:
        message = row["msg"].removeprefix("Value error, ")
        if row["type"] == "extra_forbidden":
            message = "no such field in this version"
        found.append((json_path(row["loc"]), message))
    return found


def json_path(loc: Iterable[Any]) -> str:
    """`retry.max_retries`, `secret_params[0]`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else str(part)[:100]
    return path or "body"


def invalid(field: str, message: str) -> Refused:
    return Refused(422, "validation_error", f"{field}: {message}", [(field, message)])


def all_invalid(errors: list[tuple[str, str]]) -> Refused:
    detail = "; ".join(f"{field}: {message}" for field, message in errors[:5])
    return Refused(422, "validation_error", detail, errors[:100])
