"""Device locks in Redis. They live in the partition of the device's lane: releasing one and opening the lane are one step.

A lock that has expired is as good as none. A person can set one by hand, `HSET <prefix>{p0}:locks <device> <whatever>`; it
has no task, no time and no end.
"""

from collections.abc import Mapping, Sequence

from scriptdispatch.clock import Clock
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.locks.port import Claim, Grant, Lock
from scriptdispatch.locks.redis_owed import Owed
from scriptdispatch.queue.redis_partition import Partition, moment
from scriptdispatch.redis_client import RedisClient

REBUILDING, GRANTED = 0, 1


class RedisLocks:
    def __init__(self, client: RedisClient, prefix: str, clock: Clock) -> None:
        self._client = client
        self._partition = Partition(client, prefix, clock)
        self._epoch = f"{self._partition.name}epoch"
        self._owed = Owed(self._release)

    async def acquire(self, claims: Sequence[Claim]) -> list[Grant]:
        asked = [(claim.device_id, claim.execution_id) for claim in claims]
        self._owed.forget(asked)
        try:
            answers = await self._partition.change("acquire", self._rows(claims))
        except QueueUnavailable:
            self._owed.add(asked)  # perhaps carried out; asked for again under the same id, it is not given up
            raise
        return [_grant(claim, answer) for claim, answer in zip(claims, answers, strict=True)]

    async def release(self, held: Sequence[tuple[str, str]], *, fences: Mapping[str, int] | None = None) -> list[bool]:
        try:
            return await self._release(held, fences)
        except QueueUnavailable:
            self._owed.add(held)
            raise

    async def force(self, device_id: str, value: str) -> bool:
        return (await self._release([(device_id, value)]))[0]

    async def restore(self, claims: Sequence[Claim]) -> list[bool]:
        return await self._partition.change("restore", self._rows(claims))

    async def holders(self, device_ids: Sequence[str]) -> dict[str, Lock]:
        answers = await self._partition.change("holders", list(device_ids))
        return {device_id: _lock(device_id, *row) for device_id, row in zip(device_ids, answers, strict=True) if row}

    async def all(self, after: str | None, limit: int) -> list[Lock]:
        return [_lock(*row) for row in await self._partition.view("lock_list", after or "", limit)]

    async def intact(self) -> bool:
        return bool(await self._client.command("EXISTS", self._epoch))

    async def set_intact(self) -> None:
        await self._client.command("SET", self._epoch, self._partition.now_ms(), "NX")

    async def _release(self, held: Sequence[tuple[str, str]], fences: Mapping[str, int] | None = None) -> list[bool]:
        known = fences or {}
        return await self._partition.change("release", [(device, value, known.get(device, 0)) for device, value in held])

    def _rows(self, claims: Sequence[Claim]) -> list[tuple[str, str, str, int]]:
        now = self._partition.now_ms()
        return [(claim.device_id, claim.execution_id, claim.task_id, now + round(claim.ttl_s * 1000)) for claim in claims]


def _grant(claim: Claim, answer: int | list[str | int]) -> Grant:
    if answer == REBUILDING:
        return Grant(verdict="rebuilding")
    if isinstance(answer, int):
        return Grant(verdict="granted", fence=answer - GRANTED or None)
    return Grant(verdict="held", holder=_lock(claim.device_id, *answer))  # type: ignore[arg-type]


def _lock(device_id: str, value: str, task_id: str, since_ms: int) -> Lock:
    since = None if since_ms < 0 else moment(since_ms)
    return Lock(device_id=device_id, value=value, task_id=task_id or None, since=since)
