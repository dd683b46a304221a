"""Rows of many callers travel together, and each caller gets his own answers."""

import asyncio
from typing import Any

import pytest

from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.queue import redis_gather
from scriptdispatch.queue.redis_gather import Gathering


class Server:
    """Answers each row with itself, when it is let."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, rows: list[Any]) -> list[Any]:
        self.calls.append(rows)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return rows


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_first_goes_at_once_and_who_comes_meanwhile_goes_together() -> None:
    server = Server()
    gathering = Gathering(server, 100)
    first = gathering.add(["a"])
    await turns()
    others = [gathering.add([n, -n]) for n in range(1, 4)]
    await turns()
    assert server.calls == [["a"]]
    server.may_answer.set()
    assert await asyncio.gather(first, *others) == [["a"], [1, -1], [2, -2], [3, -3]]
    assert server.calls == [["a"], [1, -1, 2, -2, 3, -3]]


async def test_a_call_carries_no_more_rows_than_the_limit() -> None:
    server = Server()
    gathering = Gathering(server, 3)
    server.may_answer.set()
    answers = await asyncio.gather(*(gathering.add([n, n]) for n in range(3)), gathering.add([]))
    assert answers == [[0, 0], [1, 1], [2, 2], []]
    assert [len(call) for call in server.calls] == [2, 2, 2]


async def test_a_cancelled_caller_takes_nobody_with_him() -> None:
    server = Server()
    gathering = Gathering(server, 100)
    callers = [gathering.add([n]) for n in range(3)]
    await turns()
    callers[1].cancel()
    server.may_answer.set()
    assert [await callers[0], await callers[2]] == [[0], [2]]


async def test_an_error_reaches_everybody_who_waits_and_the_next_call_is_a_new_one() -> None:
    server = Server()
    gathering = Gathering(server, 100)
    callers = [gathering.add([1])]
    await turns()
    callers.append(gathering.add([2]))
    server.error = QueueUnavailable("away")
    server.may_answer.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["away", "away"]
    assert outcomes[0] is not outcomes[1]
    server.error = None
    assert await gathering.add([3]) == [3]


async def test_too_many_that_wait_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_gather, "MAX_WAITING", 2)
    server = Server()
    gathering = Gathering(server, 100)
    waiting = [gathering.add([n]) for n in range(2)]
    with pytest.raises(QueueUnavailable, match="too many"):
        gathering.add([3])
    server.may_answer.set()
    assert await asyncio.gather(*waiting) == [[0], [1]]
