"""What an execution says: its messages (SPEC 6), numbered, signed, and put into the outbox in the order wanted.

The order modes of `lab_faults` live here: a test can have the terminal message first, each message three times, two
terminals that contradict each other, or messages that no consumer can use.
"""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from scriptdispatch.central.client import PushRequest
from scriptdispatch.central.lab_faults import Messages
from scriptdispatch.central.lab_ledger import Ledger
from scriptdispatch.central.lab_outbox import Outbox, Parcel
from scriptdispatch.ids import new_id
from scriptdispatch.mq.signing import sign

HELD_BACK: Final = 10_000  # lines kept for `terminal_first`; later ones go out at once
Message = dict[str, Any]


class Studio:
    """Makes the voices of one lab: the same secret, outbox, ledger and chances for all of them."""

    def __init__(
        self, outbox: Outbox, ledger: Ledger, secret: str | None, *, chance: random.Random, duplicate: float, reorder: float
    ) -> None:
        self.outbox, self.ledger, self.secret = outbox, ledger, secret
        self.chance, self.duplicate, self.reorder = chance, duplicate, reorder
        self._encoder = msgspec.json.Encoder()

    def voice(self, push: PushRequest, mode: Messages | None = None) -> "Voice":
        return Voice(self, push.execution_id, push.task_id, push.device_id, mode, 1)

    def voice_of(self, execution_id: str, task_id: str, device_id: str | None, *, first_seq: int) -> "Voice":
        return Voice(self, execution_id, task_id, device_id, None, first_seq)

    def publish(self, messages: list[Message], *, receipt: Any = None) -> None:
        """Sign and put; the receipt goes with the last one."""
        parcels = [Parcel(self.encode(message), key=_device_of(message)) for message in messages]
        if parcels and receipt is not None:
            parcels[-1].receipt = receipt
        self.outbox.put(parcels)

    def publish_any(self, messages: list[Any], *, signed: bool) -> None:
        """Whatever a test wants to see delivered; only objects can be signed."""
        bodies = [self.encode(m) if signed and isinstance(m, dict) else self._encoder.encode(m) for m in messages]
        self.outbox.put([Parcel(body, key=_device_of(m)) for m, body in zip(messages, bodies, strict=True)])

    def encode(self, message: Message) -> bytes:
        if self.secret is not None and "signature" not in message:
            message = {**message, "signature": sign(message, self.secret)}
        return self._encoder.encode(message)

    def chances(self, messages: list[Message]) -> list[Message]:
        """`--duplicate`: a message comes twice. `--reorder`: an execution's messages come in any order."""
        if self.duplicate:
            messages = [m for m in messages for _ in range(1 + (self.chance.random() < self.duplicate))]
        if self.reorder and self.chance.random() < self.reorder:
            self.chance.shuffle(messages)
        return messages


class Voice:
    def __init__(
        self, studio: Studio, execution_id: str, task_id: str, device_id: str | None, mode: Messages | None, first_seq: int
    ) -> None:
        self._studio, self._mode, self._seq = studio, mode, first_seq
        self._about = {"execution_id": execution_id, "task_id": task_id, "device_id": device_id}
        self._held: list[Message] = []
        self.said_last = False

    def line(self, stream: str, content: str) -> Message:
        return self._message("LOG", stream=stream, content=content)

    def say_line(self, stream: str, content: str) -> None:
        self._say(self.line(stream, content))

    def say_progress(self, progress: int, step: str | None) -> None:
        self._say(self._message("PROGRESS", progress=progress, **({"step": step} if step else {})))

    def end(self, kind: str, lines: list[Message] | None = None, **facts: Any) -> None:
        """The terminal message, after `lines` that were not said yet. The second call does nothing."""
        if self.said_last:
            return
        self.said_last = True
        last = self._message(kind, **facts)
        if self._mode == "silent":
            return
        self._studio.ledger.write("result", **last)
        messages = _arranged([*self._held, *(lines or [])], last, self._mode)
        receipt = self._about["execution_id"]
        self._studio.publish(self._studio.chances(messages), receipt=receipt)

    def _say(self, message: Message) -> None:
        if self._mode == "terminal_first" and len(self._held) < HELD_BACK:
            self._held.append(message)
        elif self._mode != "silent":
            self._studio.publish([message] * (3 if self._mode == "triple" else 1))

    def _message(self, kind: str, **facts: Any) -> Message:
        seq = self._seq
        self._seq += 1
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = {**self._about, "type": kind, "seq": seq, "time": time, **facts}
        if self._mode == "no_seq":
            del message["seq"]
        return message


def _device_of(message: Any) -> str | None:
    """The partition key, where the messages go by a broker."""
    device_id = message.get("device_id") if isinstance(message, dict) else None
    return device_id if isinstance(device_id, str) else None


def _arranged(lines: list[Message], last: Message, mode: Messages | None) -> list[Message]:
    arrange = _ARRANGED.get(mode) if mode is not None else None
    return arrange(lines, last) if arrange is not None else [*lines, last]


def _contradict(lines: list[Message], last: Message) -> list[Message]:
    other = "FAILURE" if last["type"] == "SUCCESS" else "SUCCESS"
    return [*lines, last, {**last, "type": other, "seq": last.get("seq", 0) + 1}]


def _poison(lines: list[Message], last: Message) -> list[Message]:
    """Messages that nobody can use, between good ones."""
    bad: list[Message] = [
        {"type": "LOG"},
        {**last, "type": "NONSENSE"},
        {**last, "type": "LOG", "seq": "seven", "content": {"no": "text"}},
        {**last, "type": "LOG", "seq": last.get("seq", 0) + 1, "content": "x" * 5_000_000},
        {**last, "type": "LOG", "seq": last.get("seq", 0) + 2, "content": "nul \x00 inside"},
    ]
    return [*bad[:2], *lines, *bad[2:], last]


_ARRANGED: Final[dict[str, Callable[[list[Message], Message], list[Message]]]] = {
    "terminal_first": lambda lines, last: [last, *lines],
    "triple": lambda lines, last: [message for message in [*lines, last] for _ in range(3)],
    "contradict": _contradict,
    "poison": _poison,
    "unknown_execution": lambda lines, last: [{**last, "execution_id": new_id()}, *lines, last],
    "wrong_device": lambda lines, last: [{**last, "device_id": "not-this-device"}, *lines, last],
    "forged": lambda lines, last: [{**last, "signature": "0" * 64}, *lines, last],
}
