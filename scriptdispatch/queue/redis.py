"""The ready queue in Redis, shared by all nodes.

Each verb is one Lua script (`lua/`), idempotent, that also computes the lanes it touched anew and, in the same step, rings
the bell for whoever sleeps in `take`, on whichever node. All of it can be lost: the store brings it back. Time is the
caller's: the clocks of the nodes must agree to within a second or so, or leases seem to end too early.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.domain.lanes import priority_of
from scriptdispatch.domain.model import PRIORITIES
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.ids import new_id
from scriptdispatch.queue.port import Item, LaneView, Leased, Place
from scriptdispatch.queue.redis_channels import Channels
from scriptdispatch.queue.redis_partition import CHUNK, Partition, ms
from scriptdispatch.redis_client import RedisClient
from scriptdispatch.sleepers import Sleepers, sleep_until_rung

log = logs.get("queue")
FIRST_LEASE_MS = 10_000  # for an owner that takes before it has ever renewed
APART_S = 1.0  # by which clocks may differ without a word
WAITING, LEASED = 1, 2


class RedisQueue:
    def __init__(self, client: RedisClient, channels: Channels, prefix: str, clock: Clock) -> None:
        self._client, self._channels = client, channels
        self._partition = Partition(client, prefix, clock)
        self._sleepers = Sleepers()
        self._deaf: Callable[[], None] | None = None  # ends the listening, once a take has begun it
        self._unanswered: dict[str, list[str]] = {}  # owner → leases of takes whose answer was lost

    async def open(self) -> None:
        try:
            await self._client.open()
            await self._channels.open()
            if (apart_s := await self._clocks_apart_s()) > APART_S:
                log.warning("clocks disagree: leases may seem to end early", event_name="redis.clock", apart_s=apart_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._channels.close()
        await self._client.close()

    async def ping(self) -> str:
        apart_s = await self._clocks_apart_s()
        hint = f", its clock and ours are {apart_s:.1f} s apart: set both by NTP" if apart_s > APART_S else ""
        return f"Redis {self._client.version}{hint}"

    # --- what goes in

    async def push(self, items: Sequence[Item]) -> None:
        await self._partition.change("push", [_row(item) for item in items])

    async def remove(self, task_ids: Sequence[str]) -> None:
        await self._partition.change("remove", list(task_ids))

    # --- what goes out

    async def take(self, owner: str, limit: int, *, wait_s: float, types: Sequence[str] | None = None) -> list[Leased]:
        if limit <= 0:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        if wait_s > 0:
            self._hear()
        with self._sleepers.alarm() as alarm:
            while True:
                alarm.clear()  # before the look: a ring from here on is about something that the look may not show
                leased, due = await self._lease(owner, limit, types)
                left = until - loop.time()
                if leased or left <= 0:
                    return leased
                now = self._partition.now_ms()
                await sleep_until_rung(alarm, left if due < 0 else min(left, (due - now) / 1000))

    async def renew(self, owner: str, ttl_s: float) -> None:
        until = self._partition.now_ms() + round(ttl_s * 1000)
        await self._client.command("ZADD", f"{self._partition.name}owners", until, owner)

    async def reclaim(self) -> int:
        """Also lays expired locks aside and looks at their lanes again."""
        back, more = 0, True
        while more:
            count, more = await self._partition.run("reclaim", self._partition.now_ms(), CHUNK)
            back += count
        return back

    async def finish(self, leased: Sequence[Leased]) -> None:
        await self._partition.change("finish", _hand(leased))

    async def give_back(self, leased: Sequence[Leased], *, crashed: bool = False) -> None:
        await self._partition.change("give_back", _hand(leased), int(crashed))

    async def reopen(self, device_ids: Sequence[str]) -> None:
        await self._partition.change("reopen", list(device_ids))

    # --- what people and the reconciler see

    async def known(self, task_ids: Sequence[str]) -> set[str]:
        if not task_ids:
            return set()
        scores = await self._client.command("ZMSCORE", f"{self._partition.name}ids", *task_ids)
        return {task_id for task_id, score in zip(task_ids, scores, strict=True) if score is not None}

    async def places(self, task_ids: Sequence[str]) -> dict[str, Place]:
        found = await self._partition.view("places", list(task_ids)) if task_ids else []
        return {task_id: _place(task_id, state, position) for task_id, state, position in found}

    async def lane(self, device_id: str, limit: int) -> list[str]:
        return [str(task_id) for task_id in await self._partition.view("lane", device_id, limit)]

    async def lanes(self, after: str | None, limit: int) -> list[LaneView]:
        found = await self._partition.view("lane_list", after or "", limit)
        return [LaneView(device_id=device_id, length=length) for device_id, length in found]

    async def ready(self) -> dict[str, int]:
        counts: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        for rank, count in await self._partition.view("ready"):
            counts[priority_of(rank)] += count
        return counts

    async def entries(self, after: str | None, limit: int) -> list[str]:
        start = f"({after}" if after else "-"
        found = await self._client.command("ZRANGEBYLEX", f"{self._partition.name}ids", start, "+", "LIMIT", 0, limit)
        return [task_id.decode() for task_id in found]

    # --- inside

    async def _clocks_apart_s(self) -> float:
        seconds, microseconds = await self._client.command("TIME")
        return abs(int(seconds) * 1000 + int(microseconds) / 1000 - self._partition.now_ms()) / 1000

    async def _lease(self, owner: str, limit: int, types: Sequence[str] | None) -> tuple[list[Leased], int]:
        """What was leased, and when the next delayed item falls due (ms; -1: there is none)."""
        job = asyncio.ensure_future(self._lease_once(owner, limit, types))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # The script may run although nobody will hear of it; its owner lives on, so no reclaim finds what it took.
            with contextlib.suppress(QueueUnavailable):  # then the next take under this lease puts it right
                await self.give_back((await job)[0])
            raise

    async def _lease_once(self, owner: str, limit: int, types: Sequence[str] | None) -> tuple[list[Leased], int]:
        unanswered = self._unanswered.setdefault(owner, [])
        repeated = bool(unanswered)
        lease = unanswered.pop() if repeated else new_id()
        kinds = False if types is None else list(types)
        try:
            first_until = self._partition.now_ms() + FIRST_LEASE_MS
            rows, due = await self._partition.view("take", owner, lease, limit, first_until, kinds, repeated)
        except QueueUnavailable:
            # Perhaps carried out: the next take uses this lease again, and the script gives back what it finds under it.
            unanswered.append(lease)
            raise
        return [_leased(lease, *row) for row in rows], due

    def _hear(self) -> None:
        """Only who takes listens. The first thing heard is that it is heard: a sleeper looks once more then."""
        if self._deaf is None:
            bell = f"{self._partition.name}bell"
            self._deaf = self._channels.listen(bell, lambda _: self._sleepers.wake(), lambda _: self._sleepers.wake())


def _row(item: Item) -> tuple[str, str, str, int, str, str]:
    return item.task_id, item.device_id or "", item.lane_key, ms(item.due_at), item.type, item.told or ""


def _hand(leased: Sequence[Leased]) -> list[tuple[str, str, str]]:
    return [(item.task_id, item.device_id or "", item.lease) for item in leased]


def _leased(lease: str, task_id: str, device_id: str, key: str, kind: str, crashes: int, told: str, free: int) -> Leased:
    return Leased(
        task_id=task_id, device_id=device_id or None, lane_key=key, type=kind, lease=lease, crashes=crashes,
        told=told or None, free=free > 0, fence=free - 1 if free > 1 else None,
    )  # fmt: skip


def _place(task_id: str, state: int, position: int) -> Place:
    leased = state == LEASED
    return Place(task_id=task_id, position=position or None, leased=leased, due=leased or state == WAITING)
