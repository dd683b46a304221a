"""What the leases of the cluster promise, on every backend: one leader, terms that only rise, who lives."""

import asyncio
from datetime import datetime, timedelta

import pytest

from scriptdispatch.domain.model import Breaker, NodeRecord, WorkerRecord
from tests.contract.queue_backends import ManualClock, Process, Rig

pytest_plugins = ["tests.contract.queue_fixtures"]


def node(name: str, started_at: datetime, workers: int = 1) -> NodeRecord:
    return NodeRecord(
        id=name,
        name=f"host of {name}",
        pid=7,
        version="1",
        started_at=started_at,
        last_heartbeat_at=started_at,
        workers=[worker(f"{name}-{n}", started_at) for n in range(workers)],
        consumer_lag=3,
        problems=["a worker cannot be started"],
        metrics={"finished": {"script": 4}},
    )


def worker(name: str, at: datetime) -> WorkerRecord:
    return WorkerRecord(
        id=name, name=name, node_id="node", pid=9, status="ready", capacity=10, load=2, task_types=["script"],
        last_heartbeat_at=at, started_at=at,
    )  # fmt: skip


async def test_one_node_leads_and_renewing_keeps_its_term(rig: Rig, manual: ManualClock) -> None:
    assert await rig.leases.leader() is None
    assert await rig.leases.lead("a", 10) == 1
    assert await rig.leases.lead("b", 10) is None
    manual.advance(9)
    assert await rig.leases.lead("a", 10) == 1
    manual.advance(9)
    assert await rig.leases.lead("b", 10) is None
    assert await rig.leases.leader() == ("a", 1)


async def test_a_lease_that_runs_out_is_taken_over_in_a_higher_term(rig: Rig, manual: ManualClock) -> None:
    await rig.leases.lead("a", 10)
    manual.advance(10)
    assert await rig.leases.leader() is None
    assert await rig.leases.lead("b", 10) == 2
    assert await rig.leases.lead("a", 10) is None
    assert await rig.leases.leader() == ("b", 2)


async def test_a_leader_whose_own_lease_ran_out_begins_a_new_term(rig: Rig, manual: ManualClock) -> None:
    await rig.leases.lead("a", 10)
    manual.advance(11)
    assert await rig.leases.lead("a", 10) == 2


async def test_only_the_leader_can_resign_and_the_term_survives_it(rig: Rig) -> None:
    await rig.leases.lead("a", 10)
    await rig.leases.resign("b")
    assert await rig.leases.leader() == ("a", 1)
    await rig.leases.resign("a")
    assert await rig.leases.leader() is None
    assert await rig.leases.lead("b", 10) == 2
    await rig.leases.resign("b")
    assert await (await rig.another()).leases.lead("b", 10) == 3


async def test_of_many_that_race_one_leads(rig: Rig) -> None:
    other = await rig.another()
    terms = await asyncio.gather(*((rig, other)[n % 2].leases.lead(f"node-{n}", 10) for n in range(10)))
    assert sorted(terms, key=str) == [1, *[None] * 9]


@pytest.mark.slow
async def test_of_many_processes_that_race_one_leads(sqlite: Rig) -> None:
    assert sqlite.path is not None
    racers = [await Process.start("lead", sqlite.path, f"node-{n}") for n in range(4)]
    for racer in racers:
        racer.go()
    assert sorted([await racer.line() for racer in racers]) == ["1", "None", "None", "None"]
    for racer in racers:
        await racer.end()


async def test_a_node_lives_as_long_as_it_beats_and_is_shown_for_a_week(rig: Rig, manual: ManualClock) -> None:
    first, second = node("a", manual.now()), node("b", manual.now() + timedelta(seconds=1), workers=2)
    await rig.leases.beat(first, 10)
    await rig.leases.beat(second, 10)
    assert await rig.leases.nodes() == [(second, True), (first, True)]
    manual.advance(9)
    await rig.leases.beat(second, 10)
    manual.advance(2)
    assert await rig.leases.nodes() == [(second, True), (first, False)]
    manual.advance(timedelta(days=7).total_seconds() - 5)
    assert [record.id for record, _ in await rig.leases.nodes()] == ["b"]


async def test_a_beat_replaces_what_the_node_said_before(rig: Rig, manual: ManualClock) -> None:
    await rig.leases.beat(node("a", manual.now(), workers=1), 10)
    newer = node("a", manual.now(), workers=3)
    await rig.leases.beat(newer, 10)
    assert await rig.leases.nodes() == [(newer, True)]


async def test_workers_that_ended_are_remembered_for_a_week(rig: Rig, manual: ManualClock) -> None:
    assert await rig.leases.gone_workers() == []
    old, new = worker("old", manual.now()), worker("new", manual.now())
    await rig.leases.workers_gone([old])
    manual.advance(timedelta(days=3).total_seconds())
    await rig.leases.workers_gone([new])
    await rig.leases.workers_gone([])
    assert await rig.leases.gone_workers() == [new, old]
    manual.advance(timedelta(days=5).total_seconds())
    assert await rig.leases.gone_workers() == [new]


async def test_the_breaker_is_one_for_the_cluster(rig: Rig, manual: ManualClock) -> None:
    other = await rig.another()
    assert await other.leases.breaker() == Breaker()
    opened = Breaker(
        open=True, since=manual.now(), reason="connection refused", probe_at=manual.now() + timedelta(seconds=5)
    )
    await rig.leases.set_breaker(opened)
    assert await other.leases.breaker() == opened
    await other.leases.set_breaker(Breaker())
    assert await rig.leases.breaker() == Breaker()
