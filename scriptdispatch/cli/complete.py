"""Completion in the shell from what the server knows, within 300 ms, else silently not: nobody waits for a TAB."""

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from scriptdispatch.cli.signs import LOOKS, clean

LIMIT_S = 0.3


def tasks(incomplete: str) -> Iterator[tuple[str, str]]:
    """The last 8 characters of recent ids, with the tasks' names."""
    for task in _items("/tasks?limit=50"):
        short = str(task.get("id", ""))[-8:]
        if short.startswith(incomplete):
            yield short, clean(f"{task.get('status')} {task.get('name')}")


def devices(incomplete: str) -> Iterator[str]:
    """Devices of recent tasks and those that are busy."""
    known = {str(task.get("device_id") or "") for task in _items("/tasks?limit=200")}
    known |= {str(device.get("id")) for device in _items("/devices")}
    yield from sorted(name for name in known if name and name.startswith(incomplete))


def states(incomplete: str) -> Iterator[str]:
    """The last of a comma list of states."""
    before, comma, last = incomplete.rpartition(",")
    yield from (f"{before}{comma}{name}" for name in LOOKS if name.startswith(last))


def _items(path: str) -> list[dict[str, Any]]:
    import http.client

    url = urlsplit(os.environ.get("SCRIPTDISPATCH_URL") or "http://127.0.0.1:8080")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    token = os.environ.get("SCRIPTDISPATCH_TOKEN")
    connection = kind(url.hostname or "127.0.0.1", url.port, timeout=LIMIT_S)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", f"{url.path.rstrip('/')}/api/v1{path}", headers=headers)
        found = json.loads(connection.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException):
        return []  # no server, no token, no time: then the shell completes nothing
    finally:
        connection.close()
    items = found.get("items") if isinstance(found, dict) else None
    return [row for row in items if isinstance(row, dict)] if isinstance(items, list) else []
