"""The messages between a master and its children: msgpack frames over a pipe. Ids, never scripts.

A frame is four bytes of length and the message. Both sides read without blocking, so a peer that stops inside a message
holds up nobody; a frame beyond MAX_FRAME or one that cannot be read means that the peer is as good as dead.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from scriptdispatch.errors import WireError
from scriptdispatch.queue.port import Leased

MAX_FRAME = 16 * 1024 * 1024
MAX_BUFFER = 4 * 1024 * 1024  # unsent bytes beyond which a child counts as stalled


class Assign(Struct, frozen=True, tag=True):
    """Master → worker: carry these out."""

    items: list[Leased]


class BreakerIs(Struct, frozen=True, tag=True):
    """Master → worker: the cluster's breaker changed."""

    open: bool


class Probe(Struct, frozen=True, tag=True):
    """Master → worker: ask central control whether it is back."""


class AskCancel(Struct, frozen=True, tag=True):
    """Master → worker: ask central control to cancel these executions, (execution id, task id) each, best effort."""

    executions: list[tuple[str, str]]


class TakeOver(Struct, frozen=True, tag=True):
    """Master → worker, M3: post these executions of dead workers again, same id, in doubt."""

    execution_ids: list[str]


class Stop(Struct, frozen=True, tag=True):
    """Master → child: take nothing new, end what is in hand within the grace, exit 0."""

    grace_s: float


class Ready(Struct, frozen=True, tag=True):
    """Child → master: started and connected."""

    pid: int


class Beat(Struct, frozen=True, tag=True):
    """Child → master, every heartbeat: load, lag (consumers), and counters since start."""

    load: int = 0
    lag: int | None = None
    metrics: dict[str, Any] = {}


class Done(Struct, frozen=True, tag=True):
    """Worker → master, W8: finished items, and items to go back into their lanes. `pause_s`: something they need is
    away, so nothing is to be handed out for that long."""

    finished: list[Leased]
    given_back: list[Leased]
    pause_s: float = 0


class CentralSeen(Struct, frozen=True, tag=True):
    """Worker → master: this worker's breaker opened (why), or a probe found central control well again."""

    well: bool
    reason: str | None = None


ToChild = Assign | BreakerIs | Probe | AskCancel | TakeOver | Stop
FromChild = Ready | Beat | Done | CentralSeen

Out = TypeVar("Out")
In = TypeVar("In")


class Pipe(Generic[Out, In]):
    """One end of a pipe, on the running loop. `send` never blocks; `receive` ends with EOFError when the peer is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    @property
    def unsent(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Out) -> None:
        if self._writer.is_closing():
            return  # the peer is gone, as `receive` tells whoever reads
        body = self._encoder.encode(message)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> In:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > MAX_FRAME:
                raise WireError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            message: In = self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError("the other end of the pipe is gone") from error
        except msgspec.DecodeError as error:
            raise WireError(f"a message that cannot be read: {error}") from error
        return message

    async def drain(self) -> None:
        """Until little enough is unsent. Only for a child: a master never waits for one."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise EOFError("the other end of the pipe is gone") from error

    def close(self) -> None:
        self._writer.close()


async def open_pipe(sock: socket.socket, incoming: Any) -> "Pipe[Any, Any]":
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_FRAME)
    return Pipe(reader, writer, incoming)


def chunks(items: Sequence[Leased], size: int = 500) -> list[list[Leased]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
