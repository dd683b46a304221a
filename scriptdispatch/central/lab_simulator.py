"""The lab's devices, pretended: an execution takes a while, says some lines and ends, as chance (seeded) has it.

Made to be cheap, because load tests measure the dispatcher, not this.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from scriptdispatch.central.client import PushRequest
from scriptdispatch.central.lab_outbox import Outbox
from scriptdispatch.central.lab_voice import Voice


class Pretended(Struct):
    voice: Voice
    timer: asyncio.TimerHandle | None


class Simulator:
    def __init__(
        self,
        outbox: Outbox,
        on_end: Callable[[str], None],
        *,
        chance: random.Random,
        duration: tuple[float, float],
        fail: float,
        silent: float,
        log_lines: int,
    ) -> None:
        self._outbox, self._on_end, self._chance = outbox, on_end, chance
        self._duration, self._fail, self._silent, self._log_lines = duration, fail, silent, log_lines
        self._pretended: dict[str, Pretended] = {}
        self._held_up: deque[tuple[str, str]] = deque()  # ended, but the outbox is full
        self._resuming: asyncio.Task[None] | None = None

    def start(self, push: PushRequest, voice: Voice) -> None:
        if self._chance.random() < self._silent:
            return
        duration = min(self._chance.uniform(*self._duration), push.timeout_seconds)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(duration, self._end, push.execution_id, "")
        self._pretended[push.execution_id] = Pretended(voice, timer)

    def cancel(self, execution_id: str) -> None:
        pretended = self._pretended.get(execution_id)
        if pretended is not None and pretended.timer is not None:
            pretended.timer.cancel()
            self._end(execution_id, "CANCELED")

    async def stop(self) -> None:
        for pretended in self._pretended.values():
            if pretended.timer is not None:
                pretended.timer.cancel()
        if self._resuming is not None:
            self._resuming.cancel()

    def _end(self, execution_id: str, kind: str) -> None:
        if self._outbox.full:
            self._pretended[execution_id].timer = None  # too late to cancel
            self._held_up.append((execution_id, kind))
            if self._resuming is None:
                self._resuming = asyncio.get_running_loop().create_task(self._resume())
            return
        pretended = self._pretended.pop(execution_id)
        kind, facts = self._result(kind)
        lines = [pretended.voice.line("stdout", f"line {n} of {self._log_lines}") for n in range(1, self._log_lines + 1)]
        self._on_end(execution_id)  # first: whoever hears of the result may push the next one at once
        pretended.voice.end(kind, lines, **facts)

    async def _resume(self) -> None:
        while self._held_up:
            await self._outbox.room()
            self._end(*self._held_up.popleft())
        self._resuming = None

    def _result(self, kind: str) -> tuple[str, dict[str, Any]]:
        if kind == "CANCELED":
            return kind, {}
        if self._chance.random() < self._fail:
            error = {"code": "EXECUTION_FAILED", "message": "the script ended with exit code 1 (simulated)"}
            return "FAILURE", {"exit_code": 1, "error": error}
        return "SUCCESS", {"exit_code": 0}
