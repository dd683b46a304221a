"""Locks that this process has to give up, as soon as Redis answers again.

A release without an answer would leave its device closed until the reconciler comes by (R1, half a minute); so would an
acquire that was carried out although its caller never heard of it, and has given up. Both are put right by
a compare-and-delete, harmless at any time: an execution id is never used twice. Lost with the process; then R1 does it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from scriptdispatch import logs
from scriptdispatch.errors import QueueUnavailable

log = logs.get("locks")
Held = tuple[str, str]  # device, execution id
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
MOST = 10_000  # beyond, the oldest are left to R1


class Owed:
    """`release` is tried until it succeeds, with pauses; there is no task while nothing is owed."""

    def __init__(self, release: Callable[[list[Held]], Awaitable[object]]) -> None:
        self._release = release
        self._owed: dict[Held, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, held: Iterable[Held]) -> None:
        self._owed |= dict.fromkeys(held)
        for oldest in list(self._owed)[:-MOST]:
            del self._owed[oldest]
        if self._owed and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._settle())

    def forget(self, held: Iterable[Held]) -> None:
        """Somebody asks for them again."""
        for one in held:
            self._owed.pop(one, None)

    async def _settle(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._owed:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                held = list(self._owed)
                try:
                    await self._release(held)
                except QueueUnavailable:
                    continue
                self.forget(held)
                log.info("locks given up after Redis was away", event_name="locks.settled", locks=len(held))
        finally:
            self._task = None
