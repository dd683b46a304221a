"""Device locks, and the leases of the cluster (leader, nodes, breaker).

The lock is a fast gate: wiped, expired or granted twice it costs time, never correctness (the store's unique index on
the open execution of a device is the wall). Compared by value, which is an execution id and never used twice.

Raises `QueueUnavailable` (locks live with the queue).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, Protocol

from msgspec import Struct

from scriptdispatch.domain.model import Breaker, NodeRecord, WorkerRecord


class Claim(Struct, frozen=True, kw_only=True):
    device_id: str
    execution_id: str
    task_id: str
    ttl_s: float


class Lock(Struct, frozen=True, kw_only=True):
    """`value` is an execution id of ours, or whatever somebody else has put there (`ids.is_id` tells)."""

    device_id: str
    value: str
    task_id: str | None
    since: datetime | None


class Grant(Struct, frozen=True, kw_only=True):
    """`granted`; `held` by another, which `holder` shows; or `rebuilding`: the locks are not restored yet (B1), wait.
    `fence`: the last one of this device that a release has named, not long ago; None: not remembered."""

    verdict: Literal["granted", "held", "rebuilding"]
    holder: Lock | None = None
    fence: int | None = None


class DeviceLocks(Protocol):
    async def acquire(self, claims: Sequence[Claim]) -> list[Grant]:
        """W2. Granted if free, expired, or already this execution's: a call repeated after a lost reply gets the same
        answer."""
        ...

    async def release(self, held: Sequence[tuple[str, str]], *, fences: Mapping[str, int] | None = None) -> list[bool]:
        """K3. (device, execution id): deletes the lock if it has this value and opens the device's lane, in one step.
        False: it was gone or another's, which is no error; the lane is looked at all the same. `fences`: of stored rows, by
        device; the holder's is a hint for the next grant (never counted here: PROTOCOL, "What the store holds")."""
        ...

    async def force(self, device_id: str, value: str) -> bool:
        """D3: compare-and-delete of whatever value was read, ours or not; opens the lane."""
        ...

    async def restore(self, claims: Sequence[Claim]) -> list[bool]:
        """R2: sets the lock if it is absent. True where it was set."""
        ...

    async def holders(self, device_ids: Sequence[str]) -> dict[str, Lock]:
        """Locks in force; devices without one are left out."""
        ...

    async def all(self, after: str | None, limit: int) -> list[Lock]:
        """All locks, by device, page by page."""
        ...

    async def intact(self) -> bool:
        """B1. False: the lock service has lost its memory (or is new) and must be rebuilt before it grants anything."""
        ...

    async def set_intact(self) -> None:
        """B2, by the leader, after restoring locks from open executions."""
        ...


class Leases(Protocol):
    async def lead(self, node_id: str, ttl_s: float) -> int | None:
        """Takes or renews the leader's lease: the term if this node leads now, else None. The term rises with each
        change of leader and survives it."""
        ...

    async def resign(self, node_id: str) -> None: ...

    async def leader(self) -> tuple[str, int] | None:
        """(node id, term) of the lease in force."""
        ...

    async def beat(self, node: NodeRecord, ttl_s: float) -> None:
        """Heartbeat of a node with all that it shows of itself. Without another one within `ttl_s` it counts as dead."""
        ...

    async def nodes(self) -> list[tuple[NodeRecord, bool]]:
        """All nodes of the last 7 days, newest first, and whether each lives."""
        ...

    async def workers_gone(self, workers: Sequence[WorkerRecord]) -> None:
        """Keeps what is known of workers that ended, for `GET /workers`, for 7 days."""
        ...

    async def gone_workers(self) -> list[WorkerRecord]: ...

    async def breaker(self) -> Breaker: ...

    async def set_breaker(self, breaker: Breaker) -> None: ...
