"""Reads by id in batches: those that arrive while one is under way go together in the next. No timers.

A read is never answered by a fetch that began before it was asked for, so it shows all that its caller has written.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")
MAX_BATCH: Final = 500
Fetch = Callable[[list[str]], Awaitable[dict[str, T]]]


class Gathered(Generic[T]):
    def __init__(self, fetch: Fetch[T]) -> None:
        self._fetch = fetch
        self._waiting: list[tuple[Sequence[str], asyncio.Future[dict[str, T]]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def get(self, ids: Sequence[str]) -> list[T | None]:
        """In the order asked; None for what is not there."""
        if not ids:
            return []
        answer: asyncio.Future[dict[str, T]] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        found = await answer
        return [found.get(id) for id in ids]

    async def _run(self) -> None:
        while self._waiting:
            batch = self._take()
            wanted = list(dict.fromkeys(id for ids, _ in batch for id in ids))
            try:
                found = await self._fetch(wanted)
            except Exception as error:
                _tell(batch, error)
            else:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_result(found)
        self._runner = None

    def _take(self) -> "list[tuple[Sequence[str], asyncio.Future[dict[str, T]]]]":
        """At least one, and as many more as fit."""
        size = count = 0
        for ids, _ in self._waiting:
            if count and size + len(ids) > MAX_BATCH:
                break
            size += len(ids)
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch


def _tell(batch: "list[tuple[Sequence[str], asyncio.Future[dict[str, T]]]]", error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)
