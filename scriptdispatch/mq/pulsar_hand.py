"""Which messages this process has in hand: received and not given up. Knows nothing of the client library.

A message that is not given up within LEASE_S is handed out again from here, so nothing needs to go back to the broker; it
gives our messages to others when our connection ends. After a reconnect the broker sends again what we have in hand: such a
copy is not handed out, but takes the place of the older one, because a batch counts as acknowledged only when all its
messages were acknowledged *of the same copy*.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from scriptdispatch.mq.port import Delivery

LEASE_S = 30.0


class Received(Protocol):
    """A message of the client library."""

    def message_id(self) -> Any: ...

    def data(self) -> bytes: ...

    def partition_key(self) -> str: ...


class Held(Struct):
    delivery: Delivery
    message: Received
    until: float


class Hand:
    def __init__(self) -> None:
        self._held: dict[str, Held] = {}  # the lease that ends next is first: all are equally long

    def __len__(self) -> int:
        return len(self._held)

    def take(self, messages: Iterable[Received], now: float) -> list[Delivery]:
        """What of it is new to us, as deliveries."""
        taken = []
        for message in messages:
            # "(ledger,entry,partition,index)": unique in a cluster, and the same whenever the message comes.
            id = str(message.message_id())[1:-1].replace(",", ":")
            if (held := self._held.get(id)) is not None:
                held.message = message
                continue
            delivery = Delivery(id=id, body=message.data(), token=id)
            self._held[id] = Held(delivery, message, now + LEASE_S)
            taken.append(delivery)
        return taken

    def overdue(self, limit: int, now: float) -> list[Delivery]:
        """Those that were not given up in time, under a new lease."""
        again: list[Held] = []
        for held in self._held.values():
            if held.until > now or len(again) == limit:
                break
            again.append(held)
        for held in again:
            del self._held[held.delivery.id]
            self._held[held.delivery.id] = Held(held.delivery, held.message, now + LEASE_S)
        return [held.delivery for held in again]

    def holding(self, deliveries: Sequence[Delivery]) -> list[Held]:
        """Those of them that are still in hand: given up twice is given up once."""
        return [held for delivery in deliveries if (held := self._held.get(delivery.id)) is not None]

    def give_up(self, deliveries: Sequence[Delivery]) -> list[Received]:
        """Out of the hand; what is to be acknowledged for it."""
        gone = [self._held.pop(delivery.id, None) for delivery in deliveries]
        return [held.message for held in gone if held is not None]

    def drop(self) -> None:
        """The connection they came by has ended: the broker delivers them again, to us or to others."""
        self._held.clear()
