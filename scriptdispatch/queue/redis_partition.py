"""The scripts of a partition, and how they are called: msgpack in, msgpack out, one step each.

A partition holds queue, lanes and locks of its devices in one slot of a Redis Cluster (`lua/lanes.lua` lists the keys).
There is one now; `partition` is where a device would find its own.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from scriptdispatch.clock import Clock
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.queue.redis_gather import Gathering
from scriptdispatch.redis_client import RedisClient, Script

T = TypeVar("T")
PARTITIONS = 1
CHUNK = 500  # rows of one script: some 5 ms in which Redis serves nobody else
AGAIN = 1000  # calls that a view makes at most until all that is due stands in its lanes


def partition(prefix: str, device_id: str = "") -> str:
    """The beginning of all keys of the device's partition; what stands in braces decides the slot."""
    return f"{prefix}{{p{crc32(device_id.encode()) % PARTITIONS}}}:"


class Partition:
    """Calls scripts of `lua/` by their names."""

    def __init__(self, client: RedisClient, prefix: str, clock: Clock) -> None:
        self.client, self.clock = client, clock
        self.name = partition(prefix)
        self._gatherings: dict[tuple[Any, ...], Gathering] = {}  # by script and what it is told beside the rows: a handful

    def now_ms(self) -> int:
        return ms(self.clock.now())

    async def run(self, script: str, *arguments: Any) -> Any:
        """None: the script asks to be called again."""
        answer = await self.client.run(_script(script), self.name, msgspec.msgpack.encode(arguments))
        return None if answer is None else msgspec.msgpack.decode(answer)

    async def change(self, script: str, rows: Sequence[Any], *more: Any) -> list[Any]:
        """With the time now, chunk by chunk, together with what others change at the moment; the answers of all rows."""
        gathering = self._gatherings.get((script, *more))
        if gathering is None:
            gathering = Gathering(partial(self._change, script, more), CHUNK)
            self._gatherings[script, *more] = gathering
        answers: list[Any] = []
        for chunk in chunks(rows):
            answers += await gathering.add(chunk)
        return answers

    async def _change(self, script: str, more: tuple[Any, ...], rows: list[Any]) -> list[Any]:
        answer = await self.run(script, self.now_ms(), rows, *more)
        return answer if isinstance(answer, list) else []

    async def view(self, script: str, *arguments: Any) -> Any:
        for _ in range(AGAIN):
            answer = await self.run(script, self.now_ms(), *arguments)
            if answer is not None:
                return answer
        raise QueueUnavailable("more items fall due than Redis can put into their lanes")


def chunks(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)


@cache
def _script(name: str) -> Script:
    folder = files("scriptdispatch.queue") / "lua"
    return Script(_code(folder / "lanes.lua") + _code(folder / f"{name}.lua"))


def _code(file: Any) -> str:
    """Without comments and indents: they would travel and be kept with every copy of the script."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("--"))
