"""Checks that API, CLI and console share on the fields people send: times, names, texts. Pure."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

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
    global _last
    if at is None:
        return None
    last, text = _last
    if at is not last:  # a task that is new, and a batch, have one moment in many places
        text = at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        _last = (at, text)
    return text


_last: tuple[datetime | None, str] = (None, "")


# What pydantic finds, by its name for it, in our words. What is not here is told in its own.
_WORDS: Final[Mapping[str, str]] = {
    "extra_forbidden": "no such field in this version",
    "missing": "is required",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "has too many digits",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "literal_error": "must be {expected}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have at most {max_length} items",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be at most {le}",
}


def plain(text: str) -> str:
    """A text that fits on one line of a table or log: ValueError if it has control characters."""
    if _CONTROL.search(text):
        raise ValueError("must not contain control characters")
    return text


def field_errors(rows: Iterable[Any]) -> list[tuple[str, str]]:
    """pydantic's errors as (JSON path, sentence)."""
    return [(json_path(row["loc"]), _in_words(row)) for row in rows]


def _in_words(row: Any) -> str:
    words = _WORDS.get(row["type"])
    if words is None:  # mostly a check of ours, which speaks for itself
        return str(row["msg"]).removeprefix("Value error, ")
    limits = {name: int(n) if isinstance(n, float) and n.is_integer() else n for name, n in row.get("ctx", {}).items()}
    return words.format(**limits)


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
