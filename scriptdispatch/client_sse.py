"""Server-sent events as the API sends them: lines in, events out. Pure; knows neither HTTP nor the API's words."""

import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

MAX_EVENT_BYTES = 4 * 1024 * 1024  # a log line is at most 64 KiB; what is far larger is not ours


class Event(Struct, frozen=True, kw_only=True):
    """One event of a task's stream. `id` is the cursor from which a resume goes on (only log lines have one)."""

    name: str
    data: dict[str, Any]
    id: str | None = None


class BadStream(Exception):
    """What came is no event stream of ours."""


class Parser:
    """Collects the lines of a stream; `feed` answers with an event whenever one is complete."""

    def __init__(self) -> None:
        self._name = "message"
        self._id: str | None = None
        self._data: list[str] = []
        self._size = 0

    def feed(self, line: str) -> Event | None:
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "id":
            self._id = value
        elif name == "data":
            self._size += len(value)
            if self._size > MAX_EVENT_BYTES:
                raise BadStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._data.append(value)
        return None  # comments keep the connection alive, unknown fields are ignored

    def _complete(self) -> Event | None:
        name, id, data = self._name, self._id, "\n".join(self._data)
        self._name, self._id, self._data, self._size = "message", None, [], 0
        if not data and name == "message":
            return None
        try:
            value = json.loads(data) if data else {}
        except ValueError as error:
            raise BadStream(f"event {name!r} is not JSON: {error}") from None
        return Event(name=name, data=value if isinstance(value, dict) else {"value": value}, id=id)


def parse(lines: list[str]) -> Iterator[Event]:
    """All events of a finished text."""
    parser = Parser()
    for line in lines:
        if (event := parser.feed(line)) is not None:
            yield event
