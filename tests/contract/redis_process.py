"""Another process on the same Redis (see `queue_backends.Process`): `<action> <url> <folder> [args]`."""

import asyncio
import sys
from pathlib import Path

from scriptdispatch.clock import SystemClock
from tests.contract.queue_backends import ROOT, Process, redis_rig
from tests.contract.queue_process import ACTIONS, hear, say


class RedisProcess(Process):
    @classmethod
    async def start_on(cls, url: str, folder: Path, action: str, *args: str) -> "RedisProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.contract.redis_process", action, url, str(folder), *args,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        started = cls(process)
        assert await started.line() == "ready"
        return started


async def main(action: str, url: str, folder: str, *args: str) -> None:
    rig = await redis_rig(Path(folder), SystemClock(), url).open()
    say("ready")
    await hear()
    await ACTIONS[action](rig, *args)
    await rig.queue.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
