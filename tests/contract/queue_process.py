"""Another process of the contract suites (see `queue_backends.Process`): `<action> <database> [args]`."""

import asyncio
import sys
import time
from pathlib import Path

from scriptdispatch.clock import SystemClock
from tests.contract.queue_backends import Rig, claim, sqlite_rig


async def take(rig: Rig, owner: str) -> None:
    """Says when it was woken, by the clock that all processes of a machine share."""
    taken = await rig.queue.take(owner, 10, wait_s=15)
    say(f"{time.monotonic()} {','.join(leased.task_id for leased in taken)}")


async def take_and_hold(rig: Rig, owner: str) -> None:
    await take(rig, owner)
    await hear()


async def take_all(rig: Rig, owner: str) -> None:
    """Takes and finishes until nothing is left, and says what it had in hand when."""
    while taken := await rig.queue.take(owner, 5, wait_s=0.3):
        for leased in taken:
            began = time.monotonic()
            await rig.queue.finish([leased])
            say(f"{leased.task_id} {leased.device_id} {began}")
    say("end")


async def acquire(rig: Rig, device_id: str) -> None:
    say((await rig.locks.acquire([claim(device_id)]))[0].verdict)


async def lead(rig: Rig, node_id: str) -> None:
    say(str(await rig.leases.lead(node_id, 30)))


async def receive(rig: Rig, limit: str) -> None:
    say(",".join(delivery.id for delivery in await rig.stream.receive(int(limit), 15)))


async def receive_and_hold(rig: Rig, limit: str) -> None:
    await receive(rig, limit)
    await hear()


async def publish_event(rig: Rig, name: str) -> None:
    await rig.events.publish([{"event": name}])


ACTIONS = {
    action.__name__: action
    for action in (take, take_and_hold, take_all, acquire, lead, receive, receive_and_hold, publish_event)
}


async def main(action: str, path: str, *args: str) -> None:
    rig = await sqlite_rig(Path(path).parent, SystemClock()).open()
    say("ready")
    await hear()
    await ACTIONS[action](rig, *args)
    await rig.close()


async def hear() -> None:
    await asyncio.to_thread(sys.stdin.readline)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
