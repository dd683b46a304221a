"""The stream of execution logs: at least once, in no promised order.

A delivery is given up (acknowledged, or rejected to the dead-letter topic) only when what it asked for is durable.
Raises `StreamUnavailable`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct


class Delivery(Struct, frozen=True, kw_only=True):
    """One message as it came. `token` is what the implementation needs to acknowledge it."""

    id: str  # stable over redeliveries, so a quarantined message is quarantined once
    body: bytes
    token: Any


class Stream(Protocol):
    most: int
    """Messages that are best taken at once: the price of a round trip, or of a transaction that others wait for."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> str: ...

    async def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        """(key, body) each. Durable when it returns."""
        ...

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        """Waits up to `wait_s` for the first message, then takes what is there, up to `limit`, without further waiting.
        What is not given up comes again: at once to others when this process dies or closes, else after a while."""
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    async def reject(self, deliveries: Sequence[Delivery]) -> None:
        """To the dead-letter topic, and acknowledged."""
        ...

    async def lag(self) -> int | None:
        """Messages not acknowledged yet; None where it cannot be known."""
        ...
