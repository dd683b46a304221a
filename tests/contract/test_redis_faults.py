"""Queue, locks and events when Redis breaks: lost answers, an emptied or stopped server, no memory, forgotten scripts.

Each test that breaks a server has one of its own. The wall behind all of it, the store, is not part of these tests.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scriptdispatch import redis_client
from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import QueueUnavailable, SettingsError
from scriptdispatch.ids import new_id
from scriptdispatch.locks.redis_leases import RedisLeases
from scriptdispatch.queue import redis_channels, redis_partition
from tests.contract.queue_backends import RedisRig, claim, item, redis_rig
from tests.server_process import Server
from tests.system.proxy import Proxy

Start = Callable[..., Server]
SCRIPTS = [path.stem for path in (Path(redis_partition.__file__).parent / "lua").glob("*.lua") if path.stem != "lanes"]


@pytest.fixture
def server(start_server: Start) -> Server:
    return start_server("redis")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


@pytest.fixture
async def rig(tmp_path: Path, server: Server) -> AsyncIterator[RedisRig]:
    made = redis_rig(tmp_path, SystemClock(), server.url)
    await made.open()
    await made.locks.set_intact()
    yield made
    await made.queue.close()


@pytest.fixture
async def far(tmp_path: Path, rig: RedisRig, server: Server, proxy: Proxy) -> AsyncIterator[RedisRig]:
    """The same data, through the proxy."""
    made = redis_rig(tmp_path, SystemClock(), proxy.through(server.url))
    await made.open()
    for name in SCRIPTS:  # so that the answer that a test drops is not "I do not know this script"
        await made.client.command("SCRIPT", "LOAD", redis_partition._script(name).source)
    yield made
    await made.queue.close()


async def again_until(call: Callable[[], Any], limit_s: float = 10) -> Any:
    """Repeats what fails while Redis is away."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await call()
            except QueueUnavailable:
                await asyncio.sleep(0.01)


# --- lost answers (F03, F21, F25)


async def test_an_acquire_whose_answer_was_lost_is_granted_when_it_is_repeated(far: RedisRig, proxy: Proxy) -> None:
    asked = claim("a")
    proxy.drop_reply(match=b"EVALSHA")
    with pytest.raises(QueueUnavailable):
        await far.locks.acquire([asked])
    assert proxy.fired["drop_reply"] == 1
    assert (await far.locks.holders(["a"]))["a"].value == asked.execution_id, "it was carried out"
    assert [grant.verdict for grant in await far.locks.acquire([asked])] == ["granted"]


async def test_what_a_take_without_an_answer_had_leased_comes_with_the_next_one(
    far: RedisRig, rig: RedisRig, proxy: Proxy
) -> None:
    items = [item(far.clock, f"dev-{n}") for n in range(3)]
    await far.queue.push(items)
    proxy.drop_reply(match=b"EVALSHA")
    with pytest.raises(QueueUnavailable):
        await far.queue.take("owner", 2, wait_s=0)
    assert proxy.fired["drop_reply"] == 1
    assert len(await rig.queue.take("another", 10, wait_s=0)) == 1, "two are leased to an owner that does not know it"
    again = await far.queue.take("owner", 10, wait_s=0)
    assert [one.task_id for one in again] == [one.task_id for one in items[:2]]
    await far.queue.finish(again)
    assert len(await rig.queue.entries(None, 10)) == 1


async def test_push_finish_and_release_do_no_more_when_they_are_repeated(far: RedisRig, rig: RedisRig, proxy: Proxy) -> None:
    pushed, following = item(far.clock, "a"), item(far.clock, "a")

    async def twice(call: Callable[[], Any]) -> Any:
        before = proxy.fired["drop_reply"]
        proxy.drop_reply(match=b"EVALSHA")
        with pytest.raises(QueueUnavailable):
            await call()
        assert proxy.fired["drop_reply"] == before + 1
        return await call()

    await twice(lambda: far.queue.push([pushed, following]))
    assert await rig.queue.lane("a", 10) == [pushed.task_id, following.task_id]
    leased = await rig.queue.take("owner", 1, wait_s=0)
    held = claim("a")
    await twice(lambda: far.locks.acquire([held]))
    await twice(lambda: far.queue.finish(leased))
    assert await rig.queue.entries(None, 10) == [following.task_id]
    assert await twice(lambda: far.locks.release([("a", held.execution_id)])) == [False], "gone already is no error"
    (next_one,) = await rig.queue.take("owner", 10, wait_s=0)
    await twice(lambda: far.queue.give_back([next_one], crashed=True))
    assert (await rig.queue.take("owner", 10, wait_s=0))[0].crashes == 1


async def test_locks_that_nobody_heard_of_are_given_up_when_redis_answers_again(
    far: RedisRig, rig: RedisRig, proxy: Proxy
) -> None:
    """Without it their devices would stay closed until the reconciler comes by."""
    closed, unheard, kept = claim("a"), claim("b"), claim("c")
    await rig.locks.acquire([closed])
    await rig.queue.push([item(rig.clock, "a"), item(rig.clock, "b")])

    async def unanswered(call: Callable[[], Any]) -> None:
        proxy.drop_reply(match=b"EVALSHA")
        with pytest.raises(QueueUnavailable):
            await call()

    await unanswered(lambda: far.locks.acquire([unheard]))
    await unanswered(lambda: far.locks.acquire([kept]))
    assert [grant.verdict for grant in await far.locks.acquire([kept])] == ["granted"], "asked for again: not given up"
    proxy.cut()
    with pytest.raises(QueueUnavailable):
        await far.locks.release([("a", closed.execution_id)])
    assert set(await rig.locks.holders(["a", "b", "c"])) == {"a", "b", "c"}
    proxy.heal()
    got: set[str | None] = set()
    async with asyncio.timeout(10):
        while got != {"a", "b"}:
            got |= {one.device_id for one in await rig.queue.take("owner", 10, wait_s=5)}
    assert set(await rig.locks.holders(["a", "b", "c"])) == {"c"}


async def test_a_stale_release_leaves_the_lock_of_the_current_holder(rig: RedisRig) -> None:
    old, new = claim("a"), claim("a")
    await rig.locks.acquire([old])
    await rig.locks.release([("a", old.execution_id)])
    await rig.locks.acquire([new])
    assert await rig.locks.release([("a", old.execution_id)]) == [False]
    assert (await rig.locks.holders(["a"]))["a"].value == new.execution_id


# --- the server dies, is emptied, stands still (F22, F26)


async def test_an_emptied_redis_grants_nothing_until_it_is_rebuilt(rig: RedisRig, server: Server) -> None:
    held = claim("a")
    await rig.locks.acquire([held])
    server.kill()
    with pytest.raises(QueueUnavailable):
        await rig.locks.acquire([claim("b")])
    server.restart()
    (grant,) = await again_until(lambda: rig.locks.acquire([claim("a")]))
    assert grant.verdict == "rebuilding"
    assert await rig.locks.intact() is False
    assert await rig.locks.restore([held]) == [True]
    await rig.queue.push([item(rig.clock, "a")])
    await rig.locks.set_intact()
    assert await rig.queue.take("owner", 10, wait_s=0) == [], "the restored lock keeps the lane closed"
    assert [grant.verdict for grant in await rig.locks.acquire([claim("a"), claim("b")])] == ["held", "granted"]


async def test_the_term_of_the_leader_rises_through_every_loss(rig: RedisRig, server: Server) -> None:
    await rig.client.command("FLUSHALL")
    terms = [await rig.leases.lead("a", 10)]
    await rig.locks.set_intact()
    assert await rig.leases.lead("a", 10) == terms[0]
    for node in ("b", "c"):
        await rig.client.command("FLUSHALL")
        await asyncio.sleep(0.002)  # nobody is elected twice in a millisecond
        # A process that has never heard of a term: there is only the clock to go by.
        terms.append(await RedisLeases(rig.client, rig.prefix, rig.clock).lead(node, 10))
        await rig.locks.set_intact()
    await rig.leases.resign("c")
    terms.append(await rig.leases.lead("a", 10))
    assert terms == sorted({term for term in terms if term is not None})


async def test_who_has_seen_a_higher_term_than_redis_remembers_goes_on_from_it(rig: RedisRig) -> None:
    """A replica that was behind has become the primary."""
    for node in ("a", "b", "a"):
        term = await rig.leases.lead(node, 10)
        await rig.leases.resign(node)
    assert term == 3
    await rig.client.command("HSET", f"{rig.prefix}{{p0}}:leader", "term", 1)
    assert await rig.leases.lead("a", 10) == 4


async def test_a_take_that_slept_through_a_restart_is_woken_afterwards(
    rig: RedisRig, server: Server, tmp_path: Path
) -> None:
    other = redis_rig(tmp_path, rig.clock, server.url)
    await other.open()
    taking = asyncio.create_task(other.queue.take("owner", 1, wait_s=20))
    await heard(rig, "{p0}:bell")
    for _ in range(3):
        await other.queue.known(["unknown"])  # asked after its last look, so answered after it: it sleeps
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    pushed = item(rig.clock, "a")
    await again_until(lambda: rig.queue.push([pushed]))
    async with asyncio.timeout(10):
        assert [one.task_id for one in await taking] == [pushed.task_id]
    await other.queue.close()


async def test_a_redis_that_stands_still_fails_everybody_in_time_and_comes_back(
    rig: RedisRig, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "ROUND_TRIP_S", 0.3)
    monkeypatch.setattr(redis_client, "CONNECT_S", 0.3)
    await rig.queue.push([item(rig.clock, "a")])
    server.pause()
    began = time.monotonic()
    outcomes = await asyncio.gather(*(rig.queue.ready() for _ in range(1000)), return_exceptions=True)
    assert all(isinstance(outcome, QueueUnavailable) for outcome in outcomes)
    await rig.events.publish([{"event": "lost"}])  # waits a moment, and does not fail
    assert time.monotonic() - began < 5
    server.resume()
    assert (await again_until(rig.queue.ready))["normal"] == 1


async def test_a_line_that_died_without_a_sign_is_noticed_and_the_bell_heard_again(
    far: RedisRig, rig: RedisRig, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bell's connection: nobody asks anything there, so only a question of ours can tell."""
    monkeypatch.setattr(redis_channels, "PING_S", 0.1)
    monkeypatch.setattr(redis_channels, "SILENCE_S", 0.3)
    monkeypatch.setattr(redis_client, "CONNECT_S", 0.3)
    proxy.cut_once()  # the line that is made now is watched with these limits
    taking = asyncio.create_task(far.queue.take("owner", 1, wait_s=30))
    await heard(rig, "{p0}:bell")
    before = proxy.connections
    proxy.black_hole()
    pushed = item(rig.clock, "a")
    await rig.queue.push([pushed])
    await asyncio.to_thread(proxy.wait_fired, "black_hole", 2)
    await asyncio.sleep(0.5)  # longer than the silence that is allowed
    assert not taking.done()
    assert before >= 1
    proxy.heal()
    async with asyncio.timeout(10):
        assert [one.task_id for one in await taking] == [pushed.task_id]


async def test_a_connection_that_the_server_closed_while_idle_costs_no_error(rig: RedisRig) -> None:
    await rig.queue.push([pushed := item(rig.clock, "a")])
    killer = redis_client.RedisClient(rig.client.url)
    assert await killer.command("CLIENT", "KILL", "TYPE", "normal") >= 1
    await killer.close()
    async with asyncio.timeout(5):
        while rig.client._line is not None and rig.client._line.alive:
            await asyncio.sleep(0.001)
    assert await rig.queue.known([pushed.task_id]) == {pushed.task_id}


# --- refusals (F27)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused_at_start(rig: RedisRig, server: Server, tmp_path: Path, policy: str) -> None:
    await rig.client.command("CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(SettingsError, match=rf"maxmemory-policy {policy}.*noeviction"):
        await redis_rig(tmp_path, SystemClock(), server.url).open()


async def test_a_wrong_password_and_a_wrong_address_are_refused_at_start(
    rig: RedisRig, server: Server, tmp_path: Path
) -> None:
    await rig.client.command("CONFIG", "SET", "requirepass", "right")
    wrong = server.url.replace("redis://", "redis://:wrong@")
    with pytest.raises(SettingsError, match="password"):
        await redis_rig(tmp_path, SystemClock(), wrong).open()
    with pytest.raises(SettingsError, match="queue_url"):
        await redis_rig(tmp_path, SystemClock(), "http://127.0.0.1").open()
    with pytest.raises(QueueUnavailable, match="not reachable"):
        await redis_rig(tmp_path, SystemClock(), "redis://127.0.0.1:1").open()
    right = redis_rig(tmp_path, SystemClock(), server.url.replace("redis://", "redis://:right@"))
    await right.open()
    await right.queue.close()


async def test_a_full_redis_takes_nothing_new_but_lets_go_of_what_it_has(rig: RedisRig) -> None:
    await rig.queue.push([first := item(rig.clock, "a"), item(rig.clock, "a")])
    leased = await rig.queue.take("owner", 1, wait_s=0)
    held = claim("a")
    await rig.locks.acquire([held])
    await rig.client.command("CONFIG", "SET", "maxmemory", "1")
    for refused in (rig.queue.push([item(rig.clock, "b")]), rig.locks.acquire([claim("b")])):
        with pytest.raises(QueueUnavailable, match=r"out of memory|OOM"):
            await refused
    await rig.queue.finish(leased)
    assert await rig.locks.release([("a", held.execution_id)]) == [True]
    await rig.client.command("CONFIG", "SET", "maxmemory", "0")
    assert first.task_id not in await rig.queue.entries(None, 10)
    assert len(await rig.queue.take("owner", 10, wait_s=0)) == 1, "nothing of the refused push is left, the lane is open"


async def test_a_read_only_replica_is_unavailable(rig: RedisRig) -> None:
    await rig.client.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(QueueUnavailable, match=r"read-only|READONLY"):
        await rig.queue.push([item(rig.clock, "a")])
    with pytest.raises(QueueUnavailable):
        await rig.locks.acquire([claim("a")])
    await rig.client.command("REPLICAOF", "NO", "ONE")
    await rig.queue.push([item(rig.clock, "a")])


def test_every_error_of_the_library_becomes_ours() -> None:
    from redis import exceptions

    kinds = [
        kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, exceptions.RedisError)
    ]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        Exception.__init__(error, "as Redis says it")
        assert isinstance(redis_client.ours(error), QueueUnavailable)


# --- forgotten scripts (F28), cancelled callers (F30)


async def test_scripts_that_redis_forgets_under_load_are_sent_again(rig: RedisRig) -> None:
    items = [item(rig.clock, f"dev-{n % 10}") for n in range(200)]
    flushed = 0

    async def forget() -> None:
        nonlocal flushed
        while True:
            await rig.client.command("SCRIPT", "FLUSH")
            flushed += 1
            await asyncio.sleep(0)

    forgetting = asyncio.create_task(forget())
    await asyncio.gather(*(rig.queue.push(items[n : n + 10]) for n in range(0, 200, 10)))
    done: list[str] = []
    while leased := await rig.queue.take("owner", 50, wait_s=0):
        held = [claim(one.device_id or "") for one in leased]
        grants = await rig.locks.acquire(held)
        assert {grant.verdict for grant in grants} == {"granted"}
        await rig.queue.finish(leased)
        await rig.locks.release([(one.device_id, one.execution_id) for one in held])
        done += [one.task_id for one in leased]
    forgetting.cancel()
    await asyncio.gather(forgetting, return_exceptions=True)
    assert sorted(done) == sorted(one.task_id for one in items)
    assert flushed > 20


async def test_a_thousand_cancelled_callers_leave_every_answer_with_its_question(rig: RedisRig) -> None:
    names = [f"{rig.prefix}known:{n}" for n in range(50)]
    for name in names:
        await rig.client.command("SET", name, name)
    chance = random.Random(7)

    async def ask(name: str) -> None:
        assert await rig.client.command("GET", name) == name.encode()

    cancelled = 0
    for _ in range(100):
        asking = [asyncio.create_task(ask(chance.choice(names))) for _ in range(20)]
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        for task in chance.sample(asking, 12):
            cancelled += task.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
    assert cancelled > 500
    assert await asyncio.gather(*(rig.client.command("GET", name) for name in names)) == [name.encode() for name in names]
    assert not rig.client._waiting


# --- events


async def heard(rig: RedisRig, channel: str) -> None:
    async with asyncio.timeout(10):
        while (await rig.client.command("PUBSUB", "NUMSUB", f"{rig.prefix}{channel}"))[1] == 0:
            await asyncio.sleep(0.002)


async def test_a_listener_whose_line_broke_gets_a_reset_and_hears_again(far: RedisRig, rig: RedisRig, proxy: Proxy) -> None:
    events: Any = far.events.listen()
    first = asyncio.ensure_future(anext(events))
    await heard(rig, "events")
    proxy.cut_once()
    async with asyncio.timeout(10):
        assert await first == {"event": "reset"}
        await rig.events.publish([{"event": "after"}])
        assert await anext(events) == {"event": "after"}
    await events.aclose()


async def test_what_could_not_be_announced_is_made_up_for_by_a_reset(far: RedisRig, rig: RedisRig, proxy: Proxy) -> None:
    events: Any = rig.events.listen()
    first = asyncio.ensure_future(anext(events))
    await heard(rig, "events")
    proxy.cut()
    await far.events.publish([{"event": "lost"}])
    proxy.heal()
    await far.events.publish([{"event": "after"}])
    async with asyncio.timeout(5):
        assert [await first, await anext(events)] == [{"event": "reset"}, {"event": "after"}]
    await events.aclose()


async def test_any_program_hears_events_as_json_on_the_channel(rig: RedisRig) -> None:
    line = await redis_client.Line.open(rig.client.url)
    line.write("SUBSCRIBE", f"{rig.prefix}events")
    assert (await line.read())[0] == b"subscribe"
    at = rig.clock.now()
    await rig.events.publish([{"event": "task.changed", "task_id": "t", "at": at}, {"event": "worker.up"}])
    text = at.isoformat().replace("+00:00", "Z")
    assert (await line.read())[2] == f'{{"event":"task.changed","task_id":"t","at":"{text}"}}'.encode()
    assert (await line.read())[2] == b'{"event":"worker.up"}'
    line.drop()


async def test_our_own_signals_are_heard_by_us_and_not_on_the_channel_for_others(rig: RedisRig) -> None:
    line = await redis_client.Line.open(rig.client.url)
    line.write("SUBSCRIBE", f"{rig.prefix}events")
    assert (await line.read())[0] == b"subscribe"
    events: Any = rig.events.listen()
    first = asyncio.ensure_future(anext(events))
    await heard(rig, "events:inner")
    await rig.events.publish([{"event": "task.log", "task_id": "t"}, {"event": "worker.up"}])
    assert (await line.read())[2] == b'{"event":"worker.up"}'
    async with asyncio.timeout(5):
        assert [await first, await anext(events)] == [{"event": "task.log", "task_id": "t"}, {"event": "worker.up"}]
    await events.aclose()
    line.drop()


# --- set by hand


async def test_a_lock_set_by_hand_needs_no_more_than_device_and_value(rig: RedisRig) -> None:
    locks = f"{rig.prefix}{{p0}}:locks"
    await rig.locks.acquire([claim("b")])
    await rig.client.command("HSET", locks, "a", "by hand")
    first, second = await rig.locks.all(None, 10)
    assert (first.device_id, first.value, first.task_id, first.since) == ("a", "by hand", None, None)
    assert second.device_id == "b"
    (grant,) = await rig.locks.acquire([claim("a")])
    assert grant.verdict == "held"
    assert grant.holder == first
    await rig.client.command("HDEL", locks, "b")
    assert [lock.device_id for lock in await rig.locks.all(None, 10)] == ["a"]
    assert await rig.locks.force("a", "by hand") is True
    assert await rig.locks.all(None, 10) == []


async def test_a_lock_set_by_hand_to_an_id_of_ours_closes_the_lane(rig: RedisRig) -> None:
    await rig.client.command("HSET", f"{rig.prefix}{{p0}}:locks", "a", new_id(), "b", new_id().upper())
    await rig.queue.push([item(rig.clock, "a"), other := item(rig.clock, "b")])
    assert [one.task_id for one in await rig.queue.take("owner", 10, wait_s=0)] == [other.task_id]
