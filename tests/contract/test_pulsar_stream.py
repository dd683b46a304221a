"""What only a broker can show: what it keeps, to whom it gives what a dead consumer had, and what we say when it is away."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import SettingsError, StreamUnavailable
from scriptdispatch.mq.port import Delivery
from tests.contract.pulsar_library import need_pulsar
from tests.server_process import free_port

need_pulsar()

import pulsar  # noqa: E402

from scriptdispatch.mq import pulsar_link  # noqa: E402
from scriptdispatch.mq.pulsar import PulsarStream  # noqa: E402
from scriptdispatch.mq.pulsar_log import BURST, library_logger  # noqa: E402
from tests.contract.pulsar_rig import bodies_in, new_topic  # noqa: E402

ROOT = Path(__file__).parents[2]
Make = Callable[[str], Awaitable[PulsarStream]]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Awaitable[PulsarStream]]]:
    """`await make(url, topic)`: an open stream, closed with the test."""
    made: list[PulsarStream] = []

    async def one(url: str, topic: str, *, consumer: bool = True) -> PulsarStream:
        made.append(PulsarStream(url, topic, SystemClock(), consumer=consumer))
        await made[-1].open()
        return made[-1]

    yield one
    for stream in made:
        await stream.close()


async def receive_all(stream: PulsarStream, count: int, within_s: float = 20) -> list[Delivery]:
    got: list[Delivery] = []
    async with asyncio.timeout(within_s):
        while len(got) < count:
            got += await stream.receive(500, 1)
    return got


def numbered(count: int) -> list[tuple[str | None, bytes]]:
    return [(f"dev-{n % 7}", str(n).encode()) for n in range(count)]


# --- what the broker keeps


async def test_what_a_foreign_producer_sent_before_there_was_a_subscription_is_received(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    client = pulsar.Client(pulsar_url, logger=library_logger())
    producer = client.create_producer(topic)
    for n in range(20):
        producer.send(str(n).encode())
    got = await receive_all(await make(pulsar_url, topic), 20)
    assert sorted(int(delivery.body) for delivery in got) == list(range(20))
    client.close()


async def test_what_we_publish_waits_under_our_subscription_before_anybody_consumes(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    publisher = await make(pulsar_url, topic, consumer=False)
    await publisher.publish(numbered(20))
    await publisher.close()
    assert await kept(pulsar_url, topic) == {str(n).encode() for n in range(20)}


async def test_a_dead_letter_waits_under_a_subscription_of_the_dead_letter_topic(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    stream = await make(pulsar_url, topic)
    await stream.publish([("dev-1", b"bad"), ("dev-1", b"good")])
    got = await receive_all(stream, 2)
    await stream.reject([delivery for delivery in got if delivery.body == b"bad"])
    await stream.ack(got)
    assert await kept(pulsar_url, f"{topic}-dlq") == {b"bad"}
    assert bodies_in(pulsar_url, f"{topic}-dlq") == [b"bad"]


async def kept(url: str, topic: str) -> set[bytes]:
    """What the subscription has. A consumer that begins at the latest message makes none of it up."""
    client = pulsar.Client(url, logger=library_logger())
    consumer = client.subscribe(topic, pulsar_link.SUBSCRIPTION, pulsar.ConsumerType.Shared)
    bodies = set()
    try:
        while True:
            bodies.add((await asyncio.to_thread(consumer.receive, 1000)).data())
    except pulsar.Timeout:
        return bodies
    finally:
        client.close()


async def test_acknowledgements_reach_the_broker(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    stream = await make(pulsar_url, topic)
    await stream.publish(numbered(50))
    got = await receive_all(stream, 50)
    await stream.ack([delivery for delivery in got if int(delivery.body) % 2])
    await stream.ack(got)
    async with asyncio.timeout(20):  # they are sent a little later: what comes again before that is acknowledged again
        while again := await (other := await make(pulsar_url, topic)).receive(500, 1):
            await other.ack(again)
            await other.close()
        await stream.close()
        assert await other.receive(500, 1) == []


# --- who gets what


async def test_what_a_killed_process_had_in_hand_goes_to_another_under_the_same_ids(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    stream = await make(pulsar_url, topic)
    await stream.publish(numbered(30))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.contract.pulsar_process", pulsar_url, topic, "10",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        held = (await process.stdout.readline()).decode().strip().split(",")
    assert all(held), "it had nothing in hand"
    assert len(held) <= 10
    process.kill()
    await process.wait()
    got = await receive_all(stream, 30)
    assert sorted(int(delivery.body) for delivery in got) == list(range(30))
    assert set(held) <= {delivery.id for delivery in got}


async def test_a_stream_that_only_publishes_does_not_receive(pulsar_url: str, make: Make) -> None:
    stream = await make(pulsar_url, new_topic(), consumer=False)
    with pytest.raises(RuntimeError, match="publishing only"):
        await stream.receive(1, 0)


async def test_closing_ends_a_receive_that_waits(pulsar_url: str, make: Make) -> None:
    stream = await make(pulsar_url, new_topic())
    await stream.receive(1, 0)  # connected
    receiving = asyncio.create_task(stream.receive(1, 60))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await stream.close()
        with pytest.raises(StreamUnavailable):
            await receiving


async def test_callers_that_publish_at_the_same_time_each_hear_of_their_own_messages(pulsar_url: str, make: Make) -> None:
    topic = new_topic()
    stream = await make(pulsar_url, topic)
    too_large = stream.publish([(None, b"x" * (6 * 1024 * 1024))])
    others = [stream.publish([(None, str(n).encode())]) for n in range(50)]
    first, *rest = await asyncio.gather(too_large, *others, return_exceptions=True)
    assert isinstance(first, ValueError)
    assert rest == [None] * 50
    assert sorted(int(delivery.body) for delivery in await receive_all(stream, 50)) == list(range(50))


# --- a broker that is away


async def test_without_a_broker_every_call_says_so_within_its_bound(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_link, "OPERATION_S", 2)
    stream = await make(f"pulsar://127.0.0.1:{free_port()}", new_topic())
    began = time.monotonic()
    calls = (stream.publish([(None, b"one")]), stream.receive(1, 0.5), stream.ping(), stream.ping())
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, StreamUnavailable) for outcome in outcomes), outcomes
    assert time.monotonic() - began < 8


async def test_an_address_that_cannot_be_one_is_an_error_of_the_settings(make: Make) -> None:
    stream = await make("localhost:6650", new_topic())
    with pytest.raises(SettingsError, match="mq_url"):
        await stream.ping()


def test_each_error_of_the_library_becomes_one_of_ours() -> None:
    link = pulsar_link.PulsarLink("pulsar://somewhere:6650", "topic")
    kinds = [kind for kind in vars(pulsar).values() if isinstance(kind, type) and issubclass(kind, pulsar.PulsarException)]
    assert len(kinds) > 30
    assert all(isinstance(link._away(kind("x")), StreamUnavailable) for kind in kinds)
    assert "cannot be reached" in str(link._away(pulsar.ConnectError("x")))
    assert "failed" in str(link._away(pulsar.UnknownError("x")))


async def test_the_librarys_complaints_are_lines_of_our_log_and_few() -> None:
    """In a process of its own: there is one such log per process, with one pace."""
    program = f"""
import asyncio, sys
from scriptdispatch import logs
from scriptdispatch.clock import SystemClock  # noqa: E402
from scriptdispatch.errors import StreamUnavailable  # noqa: E402
from scriptdispatch.mq.pulsar import PulsarStream  # noqa: E402
async def main():
    logs.configure("info", "json", process="consumer")
    stream = PulsarStream("pulsar://127.0.0.1:{free_port()}", "persistent://public/default/x", SystemClock())
    await stream.open()
    try:
        await stream.receive(1, 0)
    except StreamUnavailable as away:
        print(away)
    await stream.close()
asyncio.run(main())
"""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=pipe, stderr=pipe, cwd=ROOT)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode == 0, err
    assert out.startswith(b"Pulsar at 127.0.0.1:"), "and nothing of the library on standard output"
    lines = [msgspec.json.decode(line) for line in err.splitlines()]
    assert len(lines) == BURST
    assert "Connection refused" in lines[0]["event"]
    assert lines[0]["process"] == "consumer"
