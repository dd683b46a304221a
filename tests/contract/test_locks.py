"""What device locks promise, on every backend."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from scriptdispatch.ids import new_id
from tests.contract.queue_backends import RIGS, ManualClock, Process, Rig, claim

pytest_plugins = ["tests.contract.queue_fixtures"]


async def verdicts(rig: Rig, *claims: object) -> list[str]:
    return [grant.verdict for grant in await rig.locks.acquire(claims)]  # type: ignore[arg-type]


async def test_a_free_lock_is_granted_and_recorded(rig: Rig, manual: ManualClock) -> None:
    asked = claim("a")
    assert await verdicts(rig, asked) == ["granted"]
    lock = (await rig.locks.holders(["a", "b"]))["a"]
    assert (lock.value, lock.task_id, lock.since) == (asked.execution_id, asked.task_id, manual.now())
    assert await rig.locks.holders(["b"]) == {}


async def test_a_held_lock_shows_its_holder_and_stays_his(rig: Rig, manual: ManualClock) -> None:
    first, second = claim("a"), claim("a")
    await rig.locks.acquire([first])
    began = manual.now()
    manual.advance(3)
    (grant,) = await rig.locks.acquire([second])
    assert grant.verdict == "held"
    assert grant.holder is not None
    assert (grant.holder.value, grant.holder.task_id, grant.holder.since) == (first.execution_id, first.task_id, began)
    assert (await rig.locks.holders(["a"]))["a"].value == first.execution_id


async def test_an_acquire_repeated_after_a_lost_reply_gets_the_same_answer(rig: Rig, manual: ManualClock) -> None:
    asked = claim("a")
    began = manual.now()
    assert await verdicts(rig, asked) == ["granted"]
    manual.advance(2)
    assert await verdicts(rig, asked) == ["granted"]
    assert (await rig.locks.holders(["a"]))["a"].since == began


async def test_each_claim_of_a_batch_has_its_own_answer_in_order(rig: Rig) -> None:
    await rig.locks.acquire([claim("b")])
    assert await verdicts(rig, claim("a"), claim("b"), claim("c"), claim("a")) == ["granted", "held", "granted", "held"]
    assert await rig.locks.acquire([]) == []


async def test_an_expired_lock_is_free(rig: Rig, manual: ManualClock) -> None:
    old, new = claim("a", ttl_s=5), claim("a")
    await rig.locks.acquire([old])
    manual.advance(4.999)
    assert await verdicts(rig, new) == ["held"]
    manual.advance(0.001)
    assert await rig.locks.holders(["a"]) == {}
    assert await rig.locks.all(None, 10) == []
    assert await verdicts(rig, new) == ["granted"]
    assert await rig.locks.release([("a", old.execution_id)]) == [False], "the old holder may not free the new one's lock"
    assert (await rig.locks.holders(["a"]))["a"].value == new.execution_id


async def test_only_the_holder_releases(rig: Rig) -> None:
    held = claim("a")
    await rig.locks.acquire([held])
    assert await rig.locks.release([("a", new_id()), ("b", new_id())]) == [False, False]
    assert (await rig.locks.holders(["a"]))["a"].value == held.execution_id
    assert await rig.locks.release([("a", held.execution_id), ("a", held.execution_id)]) == [True, False]
    assert await rig.locks.holders(["a"]) == {}
    assert await rig.locks.release([]) == []


async def test_a_fence_named_by_a_release_comes_with_the_next_grant_or_not_at_all(rig: Rig, manual: ManualClock) -> None:
    """A hint: where the store numbers in one step with its insert, nobody needs it."""
    remembers = rig.kind == "redis"

    async def granted(device: str) -> int | None:
        asked = claim(device)
        (grant,) = await rig.locks.acquire([asked])
        assert grant.verdict == "granted"
        await rig.locks.release([(device, asked.execution_id)])
        return grant.fence

    assert await granted("a") is None
    held = claim("a")
    await rig.locks.acquire([held])
    await rig.locks.release([("a", held.execution_id), ("b", new_id())], fences={"a": 7, "b": 2})
    assert [await granted("a"), await granted("b"), await granted("c")] == ([7, None, None] if remembers else [None] * 3)
    for late in (6, 8):
        await rig.locks.release([("a", new_id())], fences={"a": late})
        assert await granted("a") == (7 if remembers else None), "an old release repeated: its execution is not the holder"
    manual.advance(3600)
    await rig.locks.release([("a", held.execution_id)], fences={"a": 7})
    assert await granted("a") is None, "clean-up may have removed what would refuse a fence that is too low"


async def test_force_deletes_exactly_the_value_that_was_read(rig: Rig) -> None:
    await rig.locks.restore([claim("a", "maintenance")])
    assert await rig.locks.force("a", "something else") is False
    assert (await rig.locks.holders(["a"]))["a"].value == "maintenance"
    assert await rig.locks.force("a", "maintenance") is True
    assert await rig.locks.force("a", "maintenance") is False


async def test_restore_sets_only_what_is_absent(rig: Rig, manual: ManualClock) -> None:
    held, expired, fresh = claim("a"), claim("b", ttl_s=1), claim("c")
    await rig.locks.acquire([held, expired])
    manual.advance(2)
    assert await rig.locks.restore([claim("a"), again := claim("b"), fresh]) == [False, True, True]
    values = {device: lock.value for device, lock in (await rig.locks.holders(["a", "b", "c"])).items()}
    assert values == {"a": held.execution_id, "b": again.execution_id, "c": fresh.execution_id}


async def test_all_locks_are_listed_by_device_page_by_page(rig: Rig) -> None:
    await rig.locks.acquire([claim(device) for device in ("c", "a", "d", "b")])
    first = await rig.locks.all(None, 3)
    rest = await rig.locks.all(first[-1].device_id, 3)
    assert [lock.device_id for lock in (*first, *rest)] == ["a", "b", "c", "d"]


async def test_the_lock_of_somebody_else_is_held_and_shown(rig: Rig) -> None:
    await rig.locks.restore([claim("a", "technician on site")])
    (grant,) = await rig.locks.acquire([claim("a")])
    assert grant.verdict == "held"
    assert grant.holder is not None
    assert grant.holder.value == "technician on site"


@pytest.mark.parametrize("kind", RIGS)
async def test_a_lock_service_without_memory_grants_nothing_until_it_is_rebuilt(kind: str, tmp_path: Path) -> None:
    rig = await RIGS[kind](tmp_path, ManualClock()).open()
    assert await rig.locks.intact() is False
    assert await verdicts(rig, claim("a"), claim("b")) == ["rebuilding", "rebuilding"]
    restored = claim("a")
    assert await rig.locks.restore([restored]) == [True]
    assert await rig.locks.release([("b", new_id())]) == [False]
    await rig.locks.set_intact()
    await rig.locks.set_intact()
    assert await (await rig.another()).locks.intact() is True
    assert await verdicts(rig, claim("a"), claim("b")) == ["held", "granted"]
    await rig.close()


async def test_of_many_that_race_for_a_lock_one_gets_it(rig: Rig) -> None:
    other = await rig.another()
    answers = await asyncio.gather(*((rig, other)[n % 2].locks.acquire([claim("a")]) for n in range(20)))
    assert sorted(grant.verdict for (grant,) in answers) == ["granted", *["held"] * 19]


@pytest.mark.slow
async def test_of_many_processes_that_race_for_a_lock_one_gets_it(sqlite: Rig) -> None:
    assert sqlite.path is not None
    racers = [await Process.start("acquire", sqlite.path, "a") for _ in range(5)]
    for racer in racers:
        racer.go()
    assert sorted([await racer.line() for racer in racers]) == ["granted", "held", "held", "held", "held"]
    for racer in racers:
        await racer.end()


async def test_a_lock_set_by_hand_needs_no_more_than_device_and_value(sqlite: Rig) -> None:
    """Another program writes into the table: such a lock has no task, no time and no end."""
    import apsw

    db = apsw.Connection(str(sqlite.path))
    db.execute("INSERT INTO device_lock (device_id, value) VALUES ('a', 'by hand')")
    db.close()
    (lock,) = await sqlite.locks.all(None, 10)
    assert (lock.value, lock.task_id, lock.since) == ("by hand", None, None)
    assert await verdicts(sqlite, claim("a", ttl_s=timedelta(days=1).total_seconds())) == ["held"]
    assert await sqlite.locks.force("a", "by hand") is True
