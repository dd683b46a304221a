"""Leader, nodes, workers that ended, and the breaker, in Redis.

The leader's term rises also when Redis was emptied: it goes on from the server's clock then (`lua/lead.lua`), and each node
brings the highest term that it has seen. The store refuses writes of an older term, so a term that fell back would keep the
leader from doing anything.
"""

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import Breaker, NodeRecord, WorkerRecord
from scriptdispatch.queue.redis_partition import Partition
from scriptdispatch.redis_client import RedisClient

KEEP_MS = round(timedelta(days=7).total_seconds() * 1000)


class _Node(msgspec.Struct, frozen=True, array_like=True):
    beat_ms: int
    until_ms: int
    record: NodeRecord


class _Gone(msgspec.Struct, frozen=True, array_like=True):
    at_ms: int
    record: WorkerRecord


class RedisLeases:
    def __init__(self, client: RedisClient, prefix: str, clock: Clock) -> None:
        self._client = client
        self._partition = Partition(client, prefix, clock)
        self._seen = 0  # the highest term that this process has heard of

    async def lead(self, node_id: str, ttl_s: float) -> int | None:
        now = self._partition.now_ms()
        term = await self._partition.run("lead", now, node_id, now + round(ttl_s * 1000), self._seen)
        self._seen = max(self._seen, term)
        return term or None

    async def resign(self, node_id: str) -> None:
        await self._partition.run("resign", node_id)

    async def leader(self) -> tuple[str, int] | None:
        node, term, until = await self._client.command("HMGET", f"{self._partition.name}leader", "node", "term", "until")
        self._seen = max(self._seen, int(term or 0))
        if node is None or int(until) <= self._partition.now_ms():
            return None
        return node.decode(), int(term)

    async def beat(self, node: NodeRecord, ttl_s: float) -> None:
        now = self._partition.now_ms()
        await self._remember("nodes", now, [(node.id, _Node(now, now + round(ttl_s * 1000), node))])

    async def nodes(self) -> list[tuple[NodeRecord, bool]]:
        now = self._partition.now_ms()
        found = [msgspec.json.decode(row, type=_Node) for row in await self._rows("nodes")]
        found = sorted(found, key=lambda row: (row.record.started_at, row.record.id), reverse=True)
        return [(row.record, row.until_ms > now) for row in found if row.beat_ms >= now - KEEP_MS]

    async def workers_gone(self, workers: Sequence[WorkerRecord]) -> None:
        now = self._partition.now_ms()
        if workers:
            await self._remember("gone", now, [(worker.id, _Gone(now, worker)) for worker in workers])

    async def gone_workers(self) -> list[WorkerRecord]:
        oldest = self._partition.now_ms() - KEEP_MS
        found = [msgspec.json.decode(row, type=_Gone) for row in await self._rows("gone")]
        found = sorted(found, key=lambda row: (row.at_ms, row.record.id), reverse=True)
        return [row.record for row in found if row.at_ms >= oldest]

    async def breaker(self) -> Breaker:
        found = await self._client.command("GET", f"{self._partition.name}breaker")
        return msgspec.json.decode(found, type=Breaker) if found else Breaker()

    async def set_breaker(self, breaker: Breaker) -> None:
        await self._client.command("SET", f"{self._partition.name}breaker", msgspec.json.encode(breaker))

    async def _remember(self, which: str, now: int, rows: Sequence[tuple[str, msgspec.Struct]]) -> None:
        packed = [(key, msgspec.json.encode(row).decode()) for key, row in rows]  # text: Lua's msgpack has no binary type
        await self._partition.run("remember", which, now, now - KEEP_MS, packed)

    async def _rows(self, which: str) -> list[bytes]:
        rows: list[bytes] = await self._client.command("HVALS", f"{self._partition.name}{which}")
        return rows
