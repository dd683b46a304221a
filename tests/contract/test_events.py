"""What the event bus promises, on every backend: to whoever listens now, bounded, and never in the sender's way."""

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from scriptdispatch.bell import _drain
from scriptdispatch.queue.bell_events import BellEvents
from scriptdispatch.queue.fanout import BUFFER
from scriptdispatch.queue.port import Event
from tests.contract.queue_backends import Process, Rig

pytest_plugins = ["tests.contract.queue_fixtures"]


class Ear:
    """A listener that has begun to listen."""

    def __init__(self, rig: Rig) -> None:
        self._events: Any = rig.events.listen()
        self._first = asyncio.ensure_future(anext(self._events))

    async def __aenter__(self) -> "Ear":
        await asyncio.sleep(0)  # the first step of the iterator, which listens from then on
        return self

    async def __aexit__(self, *_: object) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()

    async def hear(self, count: int) -> list[Event]:
        async with asyncio.timeout(5):
            heard = [await self._first, *[await anext(self._events) for _ in range(count - 1)]]
        self._first = asyncio.ensure_future(anext(self._events))
        return heard


async def test_every_listener_hears_every_event_in_order(rig: Rig) -> None:
    other = await rig.another()
    async with Ear(rig) as first, Ear(other) as second, Ear(other) as third:
        await rig.events.publish([{"event": "task.created", "id": 1}, {"event": "task.changed", "id": 1}])
        await other.events.publish([{"event": "task.changed", "id": 2}])
        for ear in (first, second, third):
            assert [(event["event"], event["id"]) for event in await ear.hear(3)] == [
                ("task.created", 1),
                ("task.changed", 1),
                ("task.changed", 2),
            ]


async def test_what_was_published_before_is_not_replayed(rig: Rig) -> None:
    await rig.events.publish([{"event": "before"}])
    async with Ear(rig) as ear:
        await rig.events.publish([{"event": "after"}])
        assert await ear.hear(1) == [{"event": "after"}]


async def test_nobody_listening_is_no_error(rig: Rig) -> None:
    await rig.events.publish([{"event": "task.created"}])
    await rig.events.publish([])


async def test_a_listener_that_is_too_slow_gets_reset_in_place_of_what_was_dropped(rig: Rig) -> None:
    async with Ear(rig) as ear:
        count = BUFFER * 3 + 10
        for n in range(0, count, 100):
            await rig.events.publish([{"event": "task.changed", "n": n + k} for k in range(min(100, count - n))])
            await asyncio.sleep(0)
        heard: list[Event] = []
        while not heard or heard[-1].get("n") != count - 1:
            heard += await ear.hear(1)
        assert len(heard) <= BUFFER + 1
        assert {"event": "reset"} in heard
        numbers = [event["n"] for event in heard[heard.index({"event": "reset"}) + 1 :]]
        assert numbers == list(range(numbers[0], count)), "after the reset nothing is missing"


async def test_a_slow_listener_does_not_take_from_a_fast_one(rig: Rig) -> None:
    async with Ear(rig), Ear(rig) as fast:
        heard: list[Event] = []
        for n in range(0, BUFFER * 2, 100):
            await rig.events.publish([{"event": "task.changed", "n": n + k} for k in range(100)])
            heard += await fast.hear(100)
        assert [event["n"] for event in heard] == list(range(BUFFER * 2))


async def test_a_large_batch_arrives_whole(rig: Rig) -> None:
    async with Ear(rig) as ear:
        events = [{"event": "task.changed", "n": n, "text": "x" * 1000} for n in range(300)]
        await rig.events.publish(events)
        assert await ear.hear(300) == events


async def test_listening_ends_with_the_iterator(rig: Rig) -> None:
    async def listen(events: AsyncIterator[Event]) -> None:
        async with aclosing(events) as closing:  # type: ignore[type-var]
            async for _ in closing:
                pass

    listening = asyncio.create_task(listen(rig.events.listen()))
    await asyncio.sleep(0)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    async with Ear(rig) as ear:
        await rig.events.publish([{"event": "after"}])
        assert await ear.hear(1) == [{"event": "after"}]
    if rig.path is not None:
        bells = rig.path.with_name(rig.path.name + "-bells")
        assert [name.name for name in bells.iterdir()] == []


async def test_an_event_crosses_processes(sqlite: Rig) -> None:
    assert sqlite.path is not None
    process = await Process.start("publish_event", sqlite.path, "task.created")
    async with Ear(sqlite) as ear:
        process.go()
        assert await ear.hear(1) == [{"event": "task.created"}]
    await process.end()


async def test_an_event_that_no_datagram_can_carry_becomes_a_reset(sqlite: Rig) -> None:
    async with Ear(sqlite) as ear:
        await sqlite.events.publish([{"event": "huge", "text": "x" * 100_000}, {"event": "small"}])
        assert await ear.hear(2) == [{"event": "reset"}, {"event": "small"}]


async def test_letters_lost_on_the_way_are_noticed(sqlite: Rig) -> None:
    """The listener's process stands still and its socket is full: when it goes on, it is told that something is missing."""
    other = await sqlite.another()
    async with Ear(other) as ear:
        await sqlite.events.publish([{"event": "first"}])
        assert await ear.hear(1) == [{"event": "first"}]
        stop_reading()
        for n in range(40):
            await sqlite.events.publish([{"event": "flood", "n": n, "text": "x" * 20_000}])
        go_on_reading(other)
        heard = await ear.hear(1)
        while heard[-1]["event"] == "flood":
            heard += await ear.hear(1)
        assert heard[-1] == {"event": "reset"}
        assert [event["n"] for event in heard[:-1]] == list(range(len(heard) - 1)), "what came before the loss is whole"


async def test_a_listener_that_stands_still_costs_the_sender_little(sqlite: Rig) -> None:
    other = await sqlite.another()
    async with Ear(other):
        stop_reading()
        began = time.monotonic()
        for n in range(500):
            await sqlite.events.publish([{"event": "flood", "n": n, "text": "x" * 2000}])
        assert time.monotonic() - began < 1.5
        go_on_reading(other)


def stop_reading() -> None:
    """As if the listener's process were stopped: nothing is read from its socket."""
    asyncio.get_running_loop().remove_reader(listening_socket())


def go_on_reading(rig: Rig) -> None:
    assert isinstance(rig.events, BellEvents)
    sock = listening_socket()
    asyncio.get_running_loop().add_reader(sock, _drain, sock, rig.events._open_letter)


def listening_socket() -> socket.socket:
    (found,) = (
        sock
        for sock in gc.get_objects()
        # By its type: asking a weak reference of another test for its class fails once what it stood for is gone.
        if issubclass(type(sock), socket.socket) and sock.fileno() >= 0 and "/events." in str(sock.getsockname())
    )
    return found
