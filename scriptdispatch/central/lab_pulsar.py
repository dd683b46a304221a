"""The lab's messages by Pulsar: straight into the topic that the consumers read, partition key = device."""

from collections.abc import Sequence

from scriptdispatch.central.lab_outbox import Parcel, Patience, refuse
from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import StreamUnavailable
from scriptdispatch.mq.pulsar import PulsarStream


class PulsarCarrier:
    """Whether a batch that failed is there or not is not known: it is sent again, and its readers know it by its numbers."""

    apart_s = 0.0

    def __init__(self, url: str, topic: str) -> None:
        self._stream = PulsarStream(url, topic, SystemClock(), consumer=False)
        self._opened = False

    async def close(self) -> None:
        await self._stream.close()

    async def deliver(self, batch: Sequence[Parcel]) -> int:
        if not self._opened:
            await self._stream.open()
            self._opened = True
        patience = Patience("broker")
        while True:
            try:
                await self._stream.publish([(parcel.key, parcel.body) for parcel in batch])
                return 0
            except StreamUnavailable as error:
                await patience.pause(str(error))
            except ValueError as error:  # one of them is too large for the broker: find it
                if len(batch) > 1:
                    half = len(batch) // 2
                    return await self.deliver(batch[:half]) + await self.deliver(batch[half:])
                refuse(batch[0], str(error))
                return 1
