"""Rows of many callers in one call: sent at once when none is under way, else together when it is over. Never a timer.

A hundred coroutines that each ask for one lock make one script with a hundred rows, at a third of the price.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scriptdispatch.errors import QueueUnavailable, ScriptdispatchError

MAX_WAITING = 20_000  # calls; more come only when Redis has stopped answering
Send = Callable[[list[Any]], Awaitable[list[Any]]]


@dataclass(slots=True, eq=False)
class _Part:
    rows: Sequence[Any]
    answers: "asyncio.Future[list[Any]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gathering:
    """`send` answers a value for each row, or none at all. It runs in a task of ours: no caller cancels it."""

    def __init__(self, send: Send, limit: int) -> None:
        self._send, self._limit = send, limit
        self._waiting: deque[_Part] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, rows: Sequence[Any]) -> "asyncio.Future[list[Any]]":
        if len(self._waiting) >= MAX_WAITING:
            raise QueueUnavailable("Redis does not answer in time: too many wait for it")
        part = _Part(rows)
        self._waiting.append(part)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return part.answers

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._call(self._next())
        finally:
            self._task = None

    def _next(self) -> list[_Part]:
        parts = [self._waiting.popleft()]
        count = len(parts[0].rows)
        while self._waiting and count + len(self._waiting[0].rows) <= self._limit:
            parts.append(self._waiting.popleft())
            count += len(parts[-1].rows)
        return parts

    async def _call(self, parts: list[_Part]) -> None:
        try:
            answers = await self._send([row for part in parts for row in part.rows])
        except ScriptdispatchError as error:
            # Who came meanwhile has waited as long as it takes to know that Redis does not answer.
            parts += self._waiting
            self._waiting.clear()
            for part in parts:
                if not part.answers.done():
                    part.answers.set_exception(type(error)(*error.args))  # one for each: they are raised apart
            return
        except BaseException:  # the loop ends, or a bug: whoever waits must not wait for good
            for part in (*parts, *self._waiting):
                part.answers.cancel()
            raise
        start = 0
        for part in parts:
            end = start + len(part.rows)
            if not part.answers.done():
                part.answers.set_result(answers[start:end])
            start = end
