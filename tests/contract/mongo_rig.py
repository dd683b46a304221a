"""A database for tests that run one after the other: emptied for each, its indexes left, for making them takes longer than
most tests do. And a proxy that loses answers, and requests, at the worst moment."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.servers import with_database


@pytest.fixture(scope="session")
def mongo_database(mongo_url: str) -> Iterator[str]:
    """The address of a database that only this process uses."""
    name = f"contract_{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}_{os.getpid()}"
    yield with_database(mongo_url, name)
    from pymongo import MongoClient  # only here: whoever has no server may have no driver either

    client: MongoClient[dict[str, Any]] = MongoClient(mongo_url)
    client.drop_database(name)
    client.close()


async def emptied(url: str) -> str:
    """The same address, with nothing in that database."""
    from pymongo import AsyncMongoClient

    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
    try:
        database = client.get_default_database()
        for collection in await database.list_collection_names():
            await database[collection].delete_many({})
    finally:
        await client.close()
    return url


class Proxy:
    """Between a store and mongod. `lose_answer`: the next request with these bytes is carried out, its answer is lost.
    `hold_request`: the next one is kept back and its connection cut; `release` hands it to the server, late."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._lose: bytes | None = None
        self._hold: bytes | None = None
        self._held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self.fired = 0
        self.port = 0

    def lose_answer(self, text: bytes) -> None:
        self._lose = text

    def hold_request(self, text: bytes) -> None:
        self._hold = text

    async def release(self) -> None:
        """Answers when the server has carried it out."""
        for reader, writer, request in self._held:
            writer.write(request)
            await asyncio.wait_for(_message(reader), 10)
            writer.close()
        self._held.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            await self._carry(reader, writer, there_reader, there)
        except (EOFError, OSError):
            return  # one of the two has hung up, and so do we
        finally:
            self._connections.discard(task)
            writer.close()
            if not any(held is there for _, held, _ in self._held):
                there.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:
        """One request, one answer, and again. (Streamed hellos have several answers: see `_more_to_come`.)"""
        while True:
            request = await _message(reader)
            if self._hold is not None and self._hold in request:
                self._hold = None
                self.fired += 1
                self._held.append((there_reader, there, request))
                return
            there.write(request)
            while True:
                answer = await _message(there_reader)
                if self._lose is not None and self._lose in request:
                    self._lose = None
                    self.fired += 1
                    return
                writer.write(answer)
                await writer.drain()
                if not _more_to_come(answer):
                    break

    async def close(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "little") - 4)


def _more_to_come(answer: bytes) -> bool:
    return int.from_bytes(answer[12:16], "little") == 2013 and bool(answer[16] & 2)


@contextlib.asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before the server of that address, and the address that goes through it."""
    host, _, database = url.partition("://")[2].partition("?")[0].partition("/")
    proxy = Proxy(int(host.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        # Direct: else the client would follow the replica set's own list of addresses, past the proxy.
        yield proxy, f"mongodb://127.0.0.1:{proxy.port}/{database}?directConnection=true"
    finally:
        server.close()
        await proxy.close()
