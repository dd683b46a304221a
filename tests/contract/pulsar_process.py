"""A consumer in another process, to be killed: `<url> <topic> <limit>`. Says the ids of what it received, and holds them."""

import asyncio
import sys

from scriptdispatch.clock import SystemClock
from scriptdispatch.mq.pulsar import PulsarStream


async def main(url: str, topic: str, limit: str) -> None:
    stream = PulsarStream(url, topic, SystemClock())
    await stream.open()
    held = await stream.receive(int(limit), 20)
    print(",".join(delivery.id for delivery in held), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await stream.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
