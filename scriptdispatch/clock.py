"""The clocks. Logic takes a `Clock`, so that tests can hold it; only this file reads the time."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Wall clock: aware UTC, cut to milliseconds (what every store can keep)."""
        ...

    def uptime(self) -> float:
        """Seconds that also pass while the process or machine is suspended (W6 is judged by it)."""
        ...


class SystemClock:
    def now(self) -> datetime:
        ms = time.time_ns() // 1_000_000
        return datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)

    def uptime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LoopClock(SystemClock):
    """One wall-clock time for all that happens in one turn of the event loop: what is decided together is stamped alike,
    and alike changes go to the store as one. For workers and consumers; `uptime`, which judges W6, is always read anew."""

    def __init__(self) -> None:
        self._now: datetime | None = None

    def now(self) -> datetime:
        if self._now is None:
            self._now = super().now()
            asyncio.get_running_loop().call_soon(self._forget)
        return self._now

    def _forget(self) -> None:
        self._now = None
