"""Execution-log messages: from bytes to a `Message`, or the reason why not."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from scriptdispatch.domain.model import Error, Execution, LogLine, Message, Quarantined
from scriptdispatch.mq.port import Delivery
from scriptdispatch.mq.signing import verify

_decoder = msgspec.json.Decoder(Message)
_plain = msgspec.json.Decoder(dict[str, object])
TERMINAL = ("SUCCESS", "FAILURE", "CANCELED")
FOREIGN_CODES = ("EXECUTION_FAILED", "TIMEOUT")  # error codes of ours that a message may use


class Unusable(Exception):
    """`reason` is a word for programs, the message a sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse(body: bytes, secret: str | None) -> Message:
    if not body:
        raise Unusable("empty", "the message is empty")
    try:
        message = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Unusable("invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable("not_json", str(error)) from None
    if secret is not None and not verify(_plain.decode(body), secret):
        raise Unusable("bad_signature", "the signature is missing or does not match")
    return message


def check(message: Message, row: Execution | None) -> Execution:
    """The execution that the message is about."""
    if row is None:
        raise Unusable("unknown_execution", f"there is no execution {message.execution_id[:100]!r}")
    if message.task_id != row.task_id:
        raise Unusable("wrong_task", f"execution {row.id} belongs to task {row.task_id}, not {message.task_id[:100]!r}")
    if message.device_id is not None and message.device_id != row.device_id:
        raise Unusable("wrong_device", f"execution {row.id} runs on {row.device_id}, not {message.device_id[:100]!r}")
    return row


def quarantined(delivery: Delivery, why: Unusable, now: datetime) -> Quarantined:
    return Quarantined(id=delivery.id, at=now, reason=why.reason, detail=str(why)[:1000], body=delivery.body)


def line_of(message: Message, row: Execution, now: datetime, max_bytes: int) -> LogLine | None:
    """LOG messages, and others that carry content. Late: its execution was closed before."""
    if message.content is None and message.type != "LOG":
        return None
    content, truncated = cut(message.content or "", max_bytes)
    return LogLine(
        task_id=row.task_id,
        execution_id=row.id,
        seq=message.seq,
        time=_utc(message.time) if message.time else now,
        stream=message.stream[:50],
        content=content,
        late=not row.active,
        truncated=truncated,
    )


def cut(text: str, max_bytes: int) -> tuple[str, bool]:
    if len(text) * 4 <= max_bytes:
        return text, False
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return text, False
    return raw[:max_bytes].decode("utf-8", "ignore"), True


def error_of(message: Message) -> Error:
    given = message.error or {}
    code = str(given.get("code") or "EXECUTION_FAILED")
    text = str(given.get("message") or "")
    if not text:
        text = (
            f"the script ended with exit code {message.exit_code}" if message.exit_code is not None else "the script failed"
        )
    details: dict[str, Any] = {} if code in FOREIGN_CODES else {"code": code[:100]}
    if message.exit_code is not None:
        details["exit_code"] = message.exit_code
    return Error(code=code if code in FOREIGN_CODES else "EXECUTION_FAILED", message=text[:2000], details=details)


def _utc(at: datetime) -> datetime:
    """A time without offset is taken as UTC; cut to milliseconds like all our times."""
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    return at.replace(microsecond=at.microsecond // 1000 * 1000)
