"""Execution logs that come over HTTP (SPEC 6), and the quarantine of messages that could not be used.

Here a message is only looked at as far as that needs nobody else: what has not even the shape of a message is answered at
once. What it does, and whether its execution and signature are right, is decided by the closer. 202 means that it is
durable in the stream.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from scriptdispatch.domain.model import Quarantined
from scriptdispatch.errors import Refused
from scriptdispatch.mq.messages import Unusable, parse
from scriptdispatch.mq.port import Stream
from scriptdispatch.wiring import Backends

TYPES = ("LOG", "PROGRESS", "SUCCESS", "FAILURE", "CANCELED")
MAX_MESSAGE = 1024 * 1024  # a longer line is cut by the closer; this only keeps one message from filling the stream


async def publish_messages(stream: Stream, messages: list[Any]) -> dict[str, Any]:
    """The good ones into the stream, in order; the others are answered with the reason, by index."""
    accepted: list[tuple[str | None, bytes]] = []
    rejected: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        reason = _wrong(message)
        body = b"" if reason else msgspec.json.encode(message)
        if not reason:
            reason = _wrong_shape(body)
        if reason:
            rejected.append({"index": index, "reason": reason})
        else:
            accepted.append((message.get("device_id"), body))
    if accepted:
        await stream.publish(accepted)
    return {"accepted": len(accepted), "rejected": rejected}


def _wrong(message: Any) -> str | None:
    if not isinstance(message, dict):
        return "must be a JSON object"
    for field in ("execution_id", "task_id", "type"):
        value = message.get(field)
        if not isinstance(value, str) or not 1 <= len(value) <= 200:
            return f"{field} is required and must be a text of 1 to 200 characters"
    if message["type"] not in TYPES:
        return f"type must be one of {', '.join(TYPES)}"
    return _wrong_key(message)


def _wrong_shape(body: bytes) -> str | None:
    """What the closer would quarantine whatever it is about."""
    if len(body) > MAX_MESSAGE:
        return f"is longer than {MAX_MESSAGE} bytes"
    try:
        parse(body, None)
    except Unusable as error:
        return str(error)
    return None


def _wrong_key(message: Mapping[str, Any]) -> str | None:
    device = message.get("device_id")
    if device is not None and (not isinstance(device, str) or not 1 <= len(device) <= 200):
        return "device_id must be a text of 1 to 200 characters"
    return None


async def quarantine_page(backends: Backends, before_id: str | None, limit: int) -> tuple[list[Quarantined], str | None]:
    """Newest first, and the cursor of the next page."""
    found = await backends.store.quarantined(limit + 1, before_id)
    return found[:limit], found[limit - 1].id if len(found) > limit else None


async def quarantined(backends: Backends, id: str) -> Quarantined:
    item = await backends.store.quarantined_one(id)
    if item is None:
        raise Refused(404, "not_found", f"there is no quarantined message {id[:200]}")
    return item


async def replay(backends: Backends, id: str) -> Quarantined:
    """Back into the stream, then out of the quarantine: dying in between leaves it in both, which does no harm. If it
    still cannot be used it comes back under an id of its own."""
    item = await quarantined(backends, id)
    await backends.stream.publish([(_device_of(item.body), item.body)])
    await backends.store.unquarantine(id)
    return item


def _device_of(body: bytes) -> str | None:
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    device = message.get("device_id") if isinstance(message, dict) else None
    return device if isinstance(device, str) else None


async def drop(backends: Backends, id: str) -> None:
    if not await backends.store.unquarantine(id):
        raise Refused(404, "not_found", f"there is no quarantined message {id[:200]}")
