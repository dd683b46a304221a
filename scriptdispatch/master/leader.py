"""The leader's lease: one node of the cluster runs loader, timeout checker and reconciliation for all.

The term goes into the leader's writes, so that one that was stopped and wakes up cannot write over its successor's head;
and it steps down on its own clock when it could not renew in time, whatever the lease service says.
"""

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.locks.port import Leases
from scriptdispatch.queue.port import Events
from scriptdispatch.services.fields import format_time

log = logs.get("leader")


class Leadership:
    def __init__(self, leases: Leases, events: Events, clock: Clock, node_id: str, ttl_s: float) -> None:
        self._leases, self._events, self._clock, self._node_id, self._ttl_s = leases, events, clock, node_id, ttl_s
        self._term: int | None = None
        self._until = 0.0

    @property
    def term(self) -> int | None:
        """The term while this node may act as leader, else None."""
        if self._term is not None and self._clock.uptime() >= self._until:
            log.warning("stepped down: the lease could not be renewed in time", term=self._term)
            self._term = None
        return self._term

    async def renew(self) -> bool:
        """A step of the heartbeat. True: this node has just become the leader."""
        before = self._clock.uptime()  # the lease counts from before the call: a slow answer must not stretch it
        try:
            term = await self._leases.lead(self._node_id, self._ttl_s)
        except QueueUnavailable as error:
            log.warning("the lease was not renewed", reason=str(error))
            return False
        if term is None and self._term is not None:
            log.warning("stepped down: another node leads", term=self._term)
        new = term is not None and term != self._term
        self._term = term
        self._until = before + self._ttl_s
        if new:
            log.info("leads", event_name="leader.changed", term=term)
            at = format_time(self._clock.now())
            await self._events.publish([{"event": "leader.changed", "node_id": self._node_id, "term": term, "at": at}])
        return new

    def step_down(self) -> None:
        """A write was refused because of a newer term."""
        if self._term is not None:
            log.warning("stepped down: a newer leader has written", term=self._term)
        self._term = None

    async def resign(self) -> None:
        if self._term is not None:
            self._term = None
            try:
                await self._leases.resign(self._node_id)
            except QueueUnavailable as error:
                log.info("not resigned; the lease runs out by itself", reason=str(error))
