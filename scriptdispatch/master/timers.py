"""The timers of a node, by APScheduler: a duty that fails is logged and comes again; one that is late is measured."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.errors import StaleTerm, Unavailable
from scriptdispatch.master.leader import Leadership
from scriptdispatch.metrics import Metrics

Duty = Callable[[], Awaitable[None]]
log = logs.get("timers")


class Timers:
    """A duty never overlaps itself; ticks missed meanwhile are made up for by one."""

    def __init__(self, clock: Clock, leadership: Leadership, metrics: Metrics) -> None:
        self._clock, self._leadership, self._metrics = clock, leadership, metrics
        # A short stall must not drop ticks silently, so there is no misfire limit.
        self._scheduler = AsyncIOScheduler(
            timezone="UTC", job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1}
        )
        self._due: dict[str, datetime] = {}

    def every(self, seconds: float, name: str, duty: Duty, *, leader_only: bool = False) -> None:
        async def tick() -> None:
            try:
                await self._tick(name, seconds, duty, leader_only)
            except asyncio.CancelledError:
                log.debug("ended in the middle of a duty", duty=name)  # by `stop`; the scheduler would call it a failure

        self._due[name] = self._clock.now() + timedelta(seconds=seconds)
        self._scheduler.add_job(tick, "interval", seconds=seconds, id=name, next_run_time=self._due[name])

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        self._scheduler.shutdown(wait=False)

    async def _tick(self, name: str, seconds: float, duty: Duty, leader_only: bool) -> None:
        now = self._clock.now()
        self._metrics.tick_lag[name] = max(0.0, (now - self._due[name]).total_seconds())
        self._due[name] = now + timedelta(seconds=seconds)
        if not leader_only or self._leadership.term is not None:
            await self.carry_out(name, duty)

    async def carry_out(self, name: str, duty: Duty) -> bool:
        """True: done. Also for duties outside of their timer."""
        try:
            await duty()
        except StaleTerm:
            self._leadership.step_down()
        except Unavailable as error:
            log.warning("a duty waits for a part that is away", event_name="duty.put_off", duty=name, reason=str(error))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a duty failed", event_name="duty.bug", duty=name)
        else:
            return True
        return False
