"""Frames between master and children: whole messages or none, and EOF when the other end is gone."""

import asyncio
import socket
from typing import Any

import pytest

from scriptdispatch import ids, wire
from scriptdispatch.errors import WireError
from scriptdispatch.queue.port import Leased


async def a_pair() -> "tuple[wire.Pipe[Any, Any], wire.Pipe[Any, Any]]":
    ours, theirs = socket.socketpair()
    return await wire.open_pipe(ours, wire.FromChild), await wire.open_pipe(theirs, wire.ToChild)


def an_item(n: int) -> Leased:
    return Leased(task_id=ids.new_id(), device_id=f"d{n}", lane_key="2-0", type="script", lease=ids.new_id())


async def test_messages_arrive_whole_and_in_order() -> None:
    master, child = await a_pair()
    sent = [wire.Assign(items=[an_item(n) for n in range(300)]), wire.Probe(), wire.Stop(grace_s=3)]
    for message in sent:
        master.send(message)
    assert [await child.receive() for _ in sent] == sent
    master.close()
    child.close()


async def test_the_end_of_a_peer_is_told() -> None:
    master, child = await a_pair()
    child.close()
    with pytest.raises(EOFError):
        await master.receive()


async def test_half_a_message_is_never_processed() -> None:
    ours, theirs = socket.socketpair()
    master = await wire.open_pipe(ours, wire.FromChild)
    theirs.sendall((5_000_000).to_bytes(4, "big") + b"x" * 1000)
    reading = asyncio.create_task(master.receive())
    await asyncio.sleep(0)
    assert not reading.done()
    theirs.close()
    with pytest.raises(EOFError):
        await reading


@pytest.mark.parametrize("raw", [(2**31).to_bytes(4, "big"), (3).to_bytes(4, "big") + b"\xc1\xc1\xc1"])
async def test_what_cannot_be_read_means_a_dead_peer(raw: bytes) -> None:
    ours, theirs = socket.socketpair()
    master = await wire.open_pipe(ours, wire.FromChild)
    theirs.sendall(raw)
    with pytest.raises(WireError):
        await master.receive()
    theirs.close()


async def test_sending_to_a_peer_that_does_not_read_never_blocks_and_is_seen() -> None:
    master, child = await a_pair()
    message = wire.Assign(items=[an_item(n) for n in range(500)])
    while master.unsent <= wire.MAX_BUFFER:
        master.send(message)
    assert master.unsent > wire.MAX_BUFFER
    child.close()
