"""Queue and locks in Redis against the simple model; and all that the scripts derive agrees with the items."""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis.stateful import invariant

from scriptdispatch.domain.lanes import lane_of
from scriptdispatch.redis_client import RedisClient
from tests.contract.queue_backends import RedisRig, redis_rig
from tests.contract.test_queue_machine import QueueMachine

DELAYED, WAITING, LEASED = 0, 1, 2


class RedisMachine(QueueMachine):
    make = staticmethod(redis_rig)

    @invariant()
    def everything_derived_follows_from_items_and_locks(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert isinstance(self.rig, RedisRig)
        at = f"{self.rig.prefix}{{p0}}:"
        client = self.rig.client
        found = self.run(client.command("HGETALL", f"{at}items"))
        items = dict(
            zip((key.decode() for key in found[::2]), (msgspec.msgpack.decode(row) for row in found[1::2]), strict=True)
        )
        out = {row[0]: task for task, row in items.items() if row[4] == LEASED and row[0]}
        delayed = {task for task, row in items.items() if row[4] == DELAYED}
        hands: dict[str, set[str]] = {}
        for task, row in items.items():
            if row[4] == LEASED:
                hands.setdefault(row[6], set()).add(task)
        assert self.run(table(client, f"{at}out")) == out
        assert set(self.run(members(client, f"{at}delayed"))) == delayed
        assert self.run(members(client, f"{at}ids")) == sorted(items)
        for owner in ("one", "two"):
            assert {task.decode() for task in self.run(client.command("SMEMBERS", f"{at}leased:{owner}"))} == hands.get(
                owner, set()
            )
        waiting = {lane_of(task, row[0] or None) for task, row in items.items() if row[4] == WAITING}
        heads = self.run(table(client, f"{at}heads"))
        assert set(heads) == waiting
        assert self.run(members(client, f"{at}lanes")) == sorted(lane for lane in waiting if not lane.startswith("~"))
        opened = [head for kind in ("script", "http") for head in self.run(members(client, f"{at}open:{kind}"))]
        assert sorted(opened) == sorted(head.partition("\0")[2] for head in heads.values() if head)


async def table(client: RedisClient, key: str) -> dict[str, str]:
    flat: list[Any] = await client.command("HGETALL", key)
    words = [word.decode() for word in flat]
    return dict(zip(words[::2], words[1::2], strict=True))


async def members(client: RedisClient, key: str) -> list[str]:
    return [member.decode() for member in await client.command("ZRANGE", key, 0, -1)]


TestRedisQueueAgainstTheModel = RedisMachine.TestCase
TestRedisQueueAgainstTheModel.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
