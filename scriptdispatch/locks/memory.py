"""Device locks, leader, nodes and breaker in one process. A new instance has no memory: `intact` is False."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import Breaker, NodeRecord, WorkerRecord
from scriptdispatch.locks.port import Claim, Grant, Lock
from scriptdispatch.queue.memory import MemoryQueue
from scriptdispatch.queue.memory_lanes import HeldLock

KEEP = timedelta(days=7)


class MemoryLocks:
    def __init__(self, queue: MemoryQueue, clock: Clock) -> None:
        self._queue, self._clock = queue, clock
        self._locks = queue.lanes_and_locks.locks
        self._intact = False

    async def acquire(self, claims: Sequence[Claim]) -> list[Grant]:
        if not self._intact:
            return [Grant(verdict="rebuilding") for _ in claims]
        return [self._acquire(claim) for claim in claims]

    async def release(self, held: Sequence[tuple[str, str]], *, fences: Mapping[str, int] | None = None) -> list[bool]:
        freed = [self._delete(device_id, value) for device_id, value in held]
        self._queue.look_again([device_id for device_id, _ in held])
        return freed

    async def force(self, device_id: str, value: str) -> bool:
        return (await self.release([(device_id, value)]))[0]

    async def restore(self, claims: Sequence[Claim]) -> list[bool]:
        done = []
        for claim in claims:
            absent = self._in_force(claim.device_id) is None
            if absent:
                self._set(claim, self._clock.now())
            done.append(absent)
        return done

    async def holders(self, device_ids: Sequence[str]) -> dict[str, Lock]:
        return {device_id: lock for device_id in device_ids if (lock := self._in_force(device_id)) is not None}

    async def all(self, after: str | None, limit: int) -> list[Lock]:
        found = (self._in_force(device_id) for device_id in sorted(self._locks) if device_id > (after or ""))
        return [lock for lock in found if lock is not None][:limit]

    async def intact(self) -> bool:
        return self._intact

    async def set_intact(self) -> None:
        self._intact = True

    def _acquire(self, claim: Claim) -> Grant:
        holder = self._in_force(claim.device_id)
        if holder is not None and holder.value != claim.execution_id:
            return Grant(verdict="held", holder=holder)
        self._set(claim, holder.since if holder is not None else self._clock.now())
        return Grant(verdict="granted")

    def _set(self, claim: Claim, since: datetime | None) -> None:
        expires_at = self._clock.now() + timedelta(seconds=claim.ttl_s)
        self._locks[claim.device_id] = HeldLock(claim.execution_id, claim.task_id, since, expires_at)
        self._queue.look_again([claim.device_id])

    def _delete(self, device_id: str, value: str) -> bool:
        lock = self._locks.get(device_id)
        if lock is None or lock.value != value:
            return False
        del self._locks[device_id]
        return True

    def _in_force(self, device_id: str) -> Lock | None:
        lock = self._locks.get(device_id)
        if lock is None or not lock.in_force(self._clock.now()):
            return None
        return Lock(device_id=device_id, value=lock.value, task_id=lock.task_id, since=lock.since)


class MemoryLeases:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leader: tuple[str, datetime] | None = None  # (node, until)
        self._term = 0
        self._nodes: dict[str, tuple[NodeRecord, datetime, datetime]] = {}  # (record, beat, until)
        self._gone: dict[str, tuple[WorkerRecord, datetime]] = {}
        self._breaker = Breaker()

    async def lead(self, node_id: str, ttl_s: float) -> int | None:
        now = self._clock.now()
        in_force = self._leader is not None and self._leader[1] > now
        if in_force and self._leader is not None and self._leader[0] != node_id:
            return None
        if not in_force:
            self._term += 1
        self._leader = (node_id, now + timedelta(seconds=ttl_s))
        return self._term

    async def resign(self, node_id: str) -> None:
        if self._leader is not None and self._leader[0] == node_id:
            self._leader = None

    async def leader(self) -> tuple[str, int] | None:
        if self._leader is None or self._leader[1] <= self._clock.now():
            return None
        return self._leader[0], self._term

    async def beat(self, node: NodeRecord, ttl_s: float) -> None:
        now = self._clock.now()
        self._nodes[node.id] = (node, now, now + timedelta(seconds=ttl_s))
        self._nodes = {key: row for key, row in self._nodes.items() if row[1] >= now - KEEP}

    async def nodes(self) -> list[tuple[NodeRecord, bool]]:
        now = self._clock.now()
        rows = [(node, until > now) for node, beat, until in self._nodes.values() if beat >= now - KEEP]
        return sorted(rows, key=lambda row: (row[0].started_at, row[0].id), reverse=True)

    async def workers_gone(self, workers: Sequence[WorkerRecord]) -> None:
        now = self._clock.now()
        self._gone |= {worker.id: (worker, now) for worker in workers}
        self._gone = {key: row for key, row in self._gone.items() if row[1] >= now - KEEP}

    async def gone_workers(self) -> list[WorkerRecord]:
        oldest = self._clock.now() - KEEP
        rows = [(at, worker.id, worker) for worker, at in self._gone.values() if at >= oldest]
        return [worker for _, _, worker in sorted(rows, key=lambda row: row[:2], reverse=True)]

    async def breaker(self) -> Breaker:
        return self._breaker

    async def set_breaker(self, breaker: Breaker) -> None:
        self._breaker = breaker
