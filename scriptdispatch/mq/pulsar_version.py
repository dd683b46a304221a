"""Which Pulsar this is. The client library does not tell, but the broker says it in its first answer on the wire: CONNECT,
and then CONNECTED with the version. One question on a connection of its own, for `doctor` and `/readyz`.

Frames are two lengths and a protobuf message (https://pulsar.apache.org/docs/next/developing-binary-protocol/); of it only
what is needed here is read.
"""

import asyncio
import ssl
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

PLAIN_PORT: Final = 6650
LIMIT_S: Final = 1.0
CONNECT, CONNECTED = 2, 3  # types of a command, and the numbers of the fields that carry them
OUR_NAME: Final = b"scriptdispatch"
PROTOCOL: Final = 12
LARGEST: Final = 64 * 1024  # of an answer


async def broker_version(url: str) -> str | None:
    """What the first broker of the address says of itself; None if it does not."""
    parts = urlsplit(url)
    host, port = _address(parts.netloc)
    try:
        async with asyncio.timeout(LIMIT_S):
            tls = ssl.create_default_context() if parts.scheme.endswith("+ssl") else None
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                writer.write(_hello())
                return _version_in(await _frame(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError, ValueError):
        return None


def _address(netloc: str) -> tuple[str, int]:
    first = netloc.rpartition("@")[2].split(",")[0]
    host, colon, port = first.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdigit() else (first.strip("[]"), PLAIN_PORT)


def _hello() -> bytes:
    connect = b"\x0a" + bytes([len(OUR_NAME)]) + OUR_NAME + b"\x20" + bytes([PROTOCOL])
    command = b"\x08" + bytes([CONNECT]) + b"\x12" + bytes([len(connect)]) + connect
    return (len(command) + 4).to_bytes(4, "big") + len(command).to_bytes(4, "big") + command


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if not 4 <= size <= LARGEST:
        raise ValueError("not a frame of Pulsar's")
    body = await reader.readexactly(size)
    return body[4 : 4 + int.from_bytes(body[:4], "big")]


def _version_in(command: bytes) -> str | None:
    """CONNECTED { server_version = 1 }: such as "Pulsar Server4.0.8"."""
    for number, value in _fields(command):
        if number == CONNECTED and isinstance(value, bytes):
            said = next((text for field, text in _fields(value) if field == 1 and isinstance(text, bytes)), b"")
            return said.decode("utf-8", "replace").replace("Pulsar Server", "").strip() or None
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers and bytes, which is all that these two have."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2 and at + value <= len(message):
            yield key >> 3, message[at : at + value]
            at += value
        else:
            raise ValueError("not a message of Pulsar's")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError("not a number")
