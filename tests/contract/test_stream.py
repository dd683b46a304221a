"""What the stream of execution logs promises, on every backend: at least once, given up only on purpose."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from scriptdispatch.mq.memory import MemoryStream
from tests.contract.pulsar_library import need_pulsar
from tests.contract.queue_backends import RIGS, ManualClock, Process, Rig, until

pytest_plugins = ["tests.contract.queue_fixtures"]


@pytest.fixture(params=["memory", "sqlite", "pulsar"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path, manual: ManualClock) -> AsyncIterator[Rig]:
    if request.param == "pulsar":
        url = request.getfixturevalue("pulsar_url")  # skips where there is none
        need_pulsar()
        from tests.contract.pulsar_rig import pulsar_rig

        made = await pulsar_rig(url, manual).open()
    else:
        made = await RIGS[request.param](tmp_path, manual).open()
    yield made
    await made.close()


async def publish(rig: Rig, *bodies: bytes) -> None:
    await rig.stream.publish([(None, body) for body in bodies])


def dead_letters(rig: Rig) -> list[bytes]:
    if isinstance(rig.stream, MemoryStream):
        return list(rig.stream.dead_letters)
    if rig.kind == "pulsar":
        from tests.contract.pulsar_rig import PatientStream, bodies_in

        assert isinstance(rig.stream, PatientStream)
        return bodies_in(rig.stream.url, f"{rig.stream.traffic.topic}-dlq")
    db = apsw.Connection(str(rig.path))
    found: list[bytes] = [body for (body,) in db.execute("SELECT body FROM mq_dead ORDER BY seq")]  # type: ignore[misc]
    db.close()
    return found


async def lag_is(rig: Rig, messages: int) -> bool:
    return await rig.stream.lag() == (None if rig.kind == "pulsar" else messages)


async def test_what_is_published_is_received_with_its_bytes(rig: Rig) -> None:
    await rig.stream.publish([("key", b"\x00\xff"), (None, b"second"), (None, b"")])
    got = await rig.stream.receive(10, 0)
    assert sorted(delivery.body for delivery in got) == [b"", b"\x00\xff", b"second"]
    assert len({delivery.id for delivery in got}) == 3


async def test_no_more_than_the_limit_is_received_and_the_rest_stays(rig: Rig) -> None:
    await publish(rig, *(str(n).encode() for n in range(5)))
    first, rest = await rig.stream.receive(2, 0), await rig.stream.receive(10, 0)
    assert (len(first), len(rest)) == (2, 3)
    assert {delivery.body for delivery in (*first, *rest)} == {b"0", b"1", b"2", b"3", b"4"}
    assert await rig.stream.receive(0, 0) == []


async def test_an_acknowledged_message_never_comes_again(rig: Rig, manual: ManualClock) -> None:
    await publish(rig, b"one", b"two")
    await rig.stream.ack(await rig.stream.receive(10, 0))
    manual.advance(3600)
    assert await rig.stream.receive(10, 0) == []
    assert await lag_is(rig, 0)


async def test_a_message_that_is_not_given_up_comes_again_under_the_same_id(rig: Rig, manual: ManualClock) -> None:
    await publish(rig, b"one")
    (first,) = await rig.stream.receive(10, 0)
    assert await rig.stream.receive(10, 0) == [], "it is in hand"
    manual.advance(31)
    (second,) = await rig.stream.receive(10, 0)
    assert (second.id, second.body) == (first.id, first.body)
    await rig.stream.ack([second])
    await rig.stream.ack([first, second])
    manual.advance(31)
    assert await rig.stream.receive(10, 0) == []


async def test_an_acknowledgement_under_a_lease_that_ran_out_counts(rig: Rig, manual: ManualClock) -> None:
    await publish(rig, b"one")
    old = await rig.stream.receive(10, 0)
    manual.advance(31)
    await rig.stream.ack(old)
    assert await rig.stream.receive(10, 0) == []


async def test_a_rejected_message_goes_to_the_dead_letters_and_not_out_again(rig: Rig, manual: ManualClock) -> None:
    await publish(rig, b"good", b"bad")
    got = await rig.stream.receive(10, 0)
    await rig.stream.reject([delivery for delivery in got if delivery.body == b"bad"])
    manual.advance(31)
    assert [delivery.body for delivery in await rig.stream.receive(10, 0)] == [b"good"]
    assert dead_letters(rig) == [b"bad"]
    await rig.stream.reject([delivery for delivery in got if delivery.body == b"bad"])
    assert dead_letters(rig) == [b"bad"], "rejected twice, kept once"


async def test_lag_counts_what_is_not_acknowledged(rig: Rig) -> None:
    assert await lag_is(rig, 0)
    await publish(rig, b"1", b"2", b"3")
    got = await rig.stream.receive(2, 0)
    assert await lag_is(rig, 3)
    await rig.stream.ack(got[:1])
    assert await lag_is(rig, 2)


async def test_what_a_consumer_had_in_hand_when_it_closed_comes_at_once(rig: Rig) -> None:
    other = await rig.another()
    await publish(rig, b"one", b"two")
    assert len(await other.stream.receive(1, 0)) == 1
    if rig.kind != "pulsar":  # where the other one has fetched it ahead
        assert len(await rig.stream.receive(10, 0)) == 1
    await other.stream.close()
    assert len(await rig.stream.receive(10, 1)) >= 1
    await other.stream.open()


async def test_several_consumers_never_have_the_same_message_at_the_same_time(rig: Rig) -> None:
    other = await rig.another()
    await publish(rig, *(str(n).encode() for n in range(300)))
    seen: list[str] = []

    async def consume(one: Rig) -> None:
        while got := await one.stream.receive(7, 0.05):
            seen.extend(delivery.id for delivery in got)
            await asyncio.sleep(0)
            await one.stream.ack(got)

    await asyncio.gather(*(consume((rig, other)[n % 2]) for n in range(4)))
    assert len(seen) == len(set(seen)) == 300


async def test_receive_comes_back_empty_when_its_time_is_over(rig: Rig) -> None:
    began = time.monotonic()
    assert await rig.stream.receive(1, 0.05) == []
    assert 0.04 < time.monotonic() - began < 1


async def test_a_sleeping_receive_is_woken_by_a_publish(rig: Rig) -> None:
    other = await rig.another()
    receiving = asyncio.create_task(other.stream.receive(5, 20))
    await asyncio.sleep(0)
    for _ in range(2):
        assert await lag_is(other, 0)  # asked after its look, so answered after it: it sleeps
    await publish(rig, b"one", b"two")
    async with asyncio.timeout(5):
        assert [delivery.body for delivery in await receiving] == [b"one", b"two"]


async def test_a_receive_that_is_cancelled_leaves_nothing_in_hand(rig: Rig) -> None:
    await publish(rig, *(str(n).encode() for n in range(10)))
    for steps in range(15):
        receiving = asyncio.create_task(rig.stream.receive(10, 5))
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving.cancel()
        outcome = (await asyncio.gather(receiving, return_exceptions=True))[0]
        if isinstance(outcome, list):
            break  # it was faster; the steps before have been shown
        assert await lag_is(rig, 10)
    else:
        assert len(await rig.stream.receive(10, 0)) == 10
        return
    assert len(outcome) == 10


async def test_empty_batches_do_nothing(rig: Rig) -> None:
    await rig.stream.publish([])
    await rig.stream.ack([])
    await rig.stream.reject([])
    assert rig.kind in (await rig.stream.ping()).lower()


# --- between processes


async def test_a_publish_wakes_a_consumer_in_another_process(sqlite: Rig) -> None:
    assert sqlite.path is not None
    bells = sqlite.path.with_name(sqlite.path.name + "-bells")
    process = await Process.start("receive", sqlite.path, "5")
    process.go()
    await until(lambda: bells.is_dir() and any(name.name.startswith("stream.") for name in bells.iterdir()))
    began = time.monotonic()
    await publish(sqlite, b"one")
    assert await process.line() != ""
    assert time.monotonic() - began < 1, "the bell, not the 5 s of its own look"
    await process.end()


async def test_what_a_killed_consumer_had_in_hand_comes_as_soon_as_somebody_looks(sqlite: Rig) -> None:
    assert sqlite.path is not None
    await publish(sqlite, b"one", b"two", b"three")
    process = await Process.start("receive_and_hold", sqlite.path, "2")
    process.go()
    held = (await process.line()).split(",")
    assert len(held) == 2
    assert len(await sqlite.stream.receive(10, 0)) == 1
    await process.kill()
    began = time.monotonic()
    got = await sqlite.stream.receive(10, 5)
    assert sorted(delivery.id for delivery in got) == sorted(held)
    assert time.monotonic() - began < 1


async def test_opening_frees_what_a_killed_consumer_had_and_wakes_those_who_sleep(sqlite: Rig) -> None:
    assert sqlite.path is not None
    await publish(sqlite, b"one")
    process = await Process.start("receive_and_hold", sqlite.path, "2")
    process.go()
    assert await process.line() != ""
    receiving = asyncio.create_task(sqlite.stream.receive(10, 20))
    bells = sqlite.path.with_name(sqlite.path.name + "-bells")
    await until(lambda: len([name for name in bells.iterdir() if name.name.startswith("stream.")]) == 2)
    assert await lag_is(sqlite, 1)  # answered after the receiver's look, which came first
    await process.kill()
    await sqlite.another()
    async with asyncio.timeout(2):
        assert [delivery.body for delivery in await receiving] == [b"one"]
