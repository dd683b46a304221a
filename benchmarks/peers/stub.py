"""Central control of the benchmark: the smallest HTTP/1.1 server with keep-alive (uvloop, httptools), the same for all.

A push is answered 202 at once. If its body holds `#T=<seconds since 1970>;`, the time since then is noted: create → pushed,
measured here and not by the competitor. With --mq-url the push is also carried out: LINES log lines and SUCCESS go to the
topic, as a device's central control would send them.

    GET /count, GET /stats   how many pushes, and their latencies     GET /reset[?lines=N]   from the beginning
"""

import argparse
import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import httptools
import msgspec
import uvloop

ACCEPTED = b'HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 21\r\n\r\n{"status":"accepted"}'
LINE = "output line of the script on the device " * 2
MARK = b"#T="


class Push(msgspec.Struct):
    execution_id: str
    task_id: str
    device_id: str


class Devices:
    """Says to the topic what a script has to say. One thread of the library sends, in batches."""

    def __init__(self, url: str, topic: str) -> None:
        import pulsar

        self._ok = pulsar.Result.Ok
        self._client = pulsar.Client(url)
        # Batches of 10 ms, the library's own default: with 1 ms the broker works twice as much for the same messages.
        self._producer = self._client.create_producer(
            topic,
            batching_enabled=True,
            batching_max_publish_delay_ms=10,
            block_if_queue_full=True,
            max_pending_messages=100_000,
        )
        self._decoder = msgspec.json.Decoder(Push)
        # What came of the messages, as keys. A method that is no Python code: the library calls it from a thread of its own,
        # and for every Python function that it calls there the interpreter maps new memory, 10 µs a message.
        self._results: dict[Any, Any] = {}

    @property
    def lost(self) -> int:
        """How many kinds of failure there were; 0: every message is in the topic."""
        return len(self._results.keys() - {self._ok})

    def run(self, body: bytes, lines: int) -> None:
        push = self._decoder.decode(body)
        time = datetime.now(UTC).isoformat(timespec="milliseconds")[:-6]
        ids = f'"execution_id":"{push.execution_id}","task_id":"{push.task_id}","device_id":"{push.device_id}"'
        about = f'{{{ids},"time":"{time}Z",'
        said = [f'"type":"LOG","seq":{n},"stream":"stdout","content":"{LINE}"}}' for n in range(1, lines + 1)]
        said.append(f'"type":"SUCCESS","seq":{lines + 1},"exit_code":0}}')
        for rest in said:
            self._producer.send_async((about + rest).encode(), self._results.__setitem__, partition_key=push.device_id)


class Desk:
    """What has been pushed so far."""

    def __init__(self, devices: Devices | None) -> None:
        self._devices = devices
        self.reset(5)

    def reset(self, lines: int) -> None:
        self._lines, self.count, self._took_ms = lines, 0, list[float]()

    def take(self, body: bytes) -> None:
        at = body.find(MARK)
        if at >= 0:
            self._took_ms.append((time.time() - float(body[at + len(MARK) : body.index(b";", at)])) * 1000)
        self.count += 1
        if self._devices is not None:
            self._devices.run(body, self._lines)

    def answer(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        if path == "/reset":
            self.reset(int(query.get("lines", ["5"])[0]))
        if path.startswith("/devices/"):
            return {"id": path.removeprefix("/devices/"), "online": True}
        lost = self._devices.lost if self._devices is not None else 0
        return {"count": self.count, "lost": lost, **({"ms": self._took_ms} if path == "/stats" else {})}


class Session(asyncio.Protocol):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def connection_made(self, transport: Any) -> None:
        self._transport, self._parser = transport, httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            self._transport.write(ACCEPTED)
            self._desk.take(self._body)
            return
        path, _, query = self._url.decode().partition("?")
        body = json.dumps(self._desk.answer(path, parse_qs(query))).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


async def serve(port: int, devices: Devices | None) -> None:
    desk = Desk(devices)
    server = await asyncio.get_running_loop().create_server(lambda: Session(desk), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mq-url")
    parser.add_argument("--mq-topic")
    given = parser.parse_args()
    uvloop.run(serve(given.port, Devices(given.mq_url, given.mq_topic) if given.mq_url else None))
