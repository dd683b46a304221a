"""Which version a broker says it is; and that whoever is no broker costs a moment and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scriptdispatch.mq.pulsar_version import _address, broker_version


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"pulsar://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_real_broker_says_its_version(pulsar_url: str) -> None:
    version = await broker_version(pulsar_url)
    assert version is not None
    assert version.split(".")[0].isdigit(), version


async def test_of_several_addresses_the_first_is_asked(pulsar_url: str) -> None:
    assert await broker_version(f"{pulsar_url},127.0.0.1:1") == await broker_version(pulsar_url)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff",
        b"\x00\x00\x00\x08\x00\x00\x00\x04\x08\x03\x1a\x00",
    ],
    ids=["nothing", "a web server", "half a number", "no version"],
)
async def test_whoever_is_no_broker_has_no_version(answer: bytes) -> None:
    async with answering(answer) as url:
        assert await broker_version(url) is None


async def test_nobody_has_no_version() -> None:
    assert await broker_version("pulsar://127.0.0.1:1") is None


def test_addresses_as_people_write_them() -> None:
    assert _address("broker") == ("broker", 6650)
    assert _address("user:pw@broker:7000,other:1") == ("broker", 7000)
    assert _address("[::1]:6651") == ("::1", 6651)
    assert _address("[::1]") == ("::1", 6650)
