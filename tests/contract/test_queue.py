"""What the ready queue promises, on every backend."""

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from scriptdispatch.ids import new_id
from tests.contract.queue_backends import ManualClock, RedisRig, Rig, claim, item

pytest_plugins = ["tests.contract.queue_fixtures"]


async def take(rig: Rig, limit: int = 10, owner: str = "owner") -> list[str]:
    return [leased.task_id for leased in await rig.queue.take(owner, limit, wait_s=0)]


async def test_items_leave_in_the_order_of_their_keys_within_and_between_lanes(rig: Rig, manual: ManualClock) -> None:
    low, normal, high = (item(manual, "a", priority=priority) for priority in ("low", "normal", "high"))
    other, loose = item(manual, "b"), item(manual, None, priority="high")
    await rig.queue.push([low, normal, other, high, loose])
    first = await rig.queue.take("owner", 10, wait_s=0)
    assert [leased.task_id for leased in first] == [high.task_id, loose.task_id, other.task_id]
    await rig.queue.finish(first)
    second = await rig.queue.take("owner", 10, wait_s=0)
    assert [leased.task_id for leased in second] == [normal.task_id]
    await rig.queue.finish(second)
    assert await take(rig) == [low.task_id]


async def test_a_leased_item_says_all_that_was_pushed(rig: Rig, manual: ManualClock) -> None:
    pushed = item(manual, "a", kind="http")
    await rig.queue.push([pushed])
    (leased,) = await rig.queue.take("owner", 1, wait_s=0)
    assert (leased.task_id, leased.device_id, leased.lane_key) == (pushed.task_id, "a", pushed.lane_key)
    assert (leased.type, leased.crashes) == ("http", 0)


async def test_what_was_told_of_a_task_is_for_who_takes_it_first(rig: Rig, manual: ManualClock) -> None:
    """A queue may forget it, and nothing old is told again."""
    pushed = replace(item(manual, "a"), told='{"a":"é"}')
    await rig.queue.push([pushed])
    (leased,) = await rig.queue.take("owner", 1, wait_s=0)
    assert leased.told in ([pushed.told] if rig.kind == "redis" else [pushed.told, None])
    await rig.queue.give_back([leased])
    (again,) = await rig.queue.take("owner", 1, wait_s=0)
    assert again.told is None
    await rig.queue.push([replace(pushed, told=None)])
    (anew,) = await rig.queue.take("owner", 1, wait_s=0)
    assert anew.told is None


async def test_a_device_counts_as_free_only_if_nobody_has_its_lock(rig: Rig, manual: ManualClock) -> None:
    """A queue that does not see the locks says nothing of it, and claims nothing."""
    sees = rig.kind == "redis"

    async def taken(device: str | None) -> tuple[bool, int | None]:
        await rig.queue.push([item(manual, device)])
        (leased,) = await rig.queue.take("owner", 1, wait_s=0)
        await rig.queue.finish([leased])
        return leased.free, leased.fence

    assert await taken("a") == (sees, None)
    held = claim("a")
    await rig.locks.acquire([held])
    await rig.locks.release([("a", held.execution_id)], fences={"a": 7})
    assert await taken("a") == (sees, 7 if sees else None)
    assert await taken(None) == (False, None)
    await rig.locks.restore([claim("b", "a person", ttl_s=30)])
    assert await taken("b") == (False, None)
    manual.advance(31)
    assert await taken("b") == (sees, None)
    if isinstance(rig, RedisRig):
        await rig.client.command("DEL", f"{rig.prefix}{{p0}}:epoch")
        assert await taken("c") == (False, None), "its locks were lost"


async def test_two_tasks_of_a_device_are_never_out_at_a_time(rig: Rig, manual: ManualClock) -> None:
    other = await rig.another()
    await rig.queue.push([item(manual, "a") for _ in range(5)])
    assert len(await take(rig, 10, "first")) == 1
    assert await take(rig, 10, "first") == []
    assert await take(other, 10, "second") == []


async def test_tasks_without_a_device_are_out_together(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, None) for _ in range(5)]
    await rig.queue.push(items)
    assert await take(rig) == [pushed.task_id for pushed in items]


async def test_no_more_than_the_limit_is_taken(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, None) for _ in range(5)]
    await rig.queue.push(items)
    assert await take(rig, 2) == [pushed.task_id for pushed in items[:2]]
    assert await take(rig, 0) == []
    assert await take(rig, 9) == [pushed.task_id for pushed in items[2:]]


async def test_a_task_pushed_twice_is_delivered_once(rig: Rig, manual: ManualClock) -> None:
    pushed = item(manual, "a")
    await rig.queue.push([pushed, pushed])
    await rig.queue.push([pushed])
    assert await rig.queue.entries(None, 10) == [pushed.task_id]
    leased = await rig.queue.take("owner", 10, wait_s=0)
    await rig.queue.finish(leased)
    assert await take(rig) == []
    assert await rig.queue.known([pushed.task_id]) == set()


async def test_a_task_pushed_again_takes_the_newer_time_and_key(rig: Rig, manual: ManualClock) -> None:
    first, second = item(manual, "a", priority="low"), item(manual, "a")
    await rig.queue.push([first, second])
    await rig.queue.push([item(manual, "a", priority="high", task_id=first.task_id)])
    assert await rig.queue.lane("a", 10) == [first.task_id, second.task_id]
    await rig.queue.push([item(manual, "a", priority="high", due_in=5, task_id=first.task_id)])
    assert await rig.queue.lane("a", 10) == [second.task_id]
    assert await take(rig) == [second.task_id]


async def test_a_delayed_item_is_not_in_the_way_and_comes_on_time(rig: Rig, manual: ManualClock) -> None:
    later, now = item(manual, "a", priority="high", due_in=10), item(manual, "a")
    await rig.queue.push([later, now])
    leased = await rig.queue.take("owner", 10, wait_s=0)
    assert [one.task_id for one in leased] == [now.task_id]
    await rig.queue.finish(leased)
    manual.advance(9.999)
    assert await take(rig) == []
    manual.advance(0.001)
    assert await take(rig) == [later.task_id]


async def test_an_item_that_falls_due_stands_in_a_closed_lane_until_it_opens(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([first := item(manual, "a"), second := item(manual, "a", due_in=1)])
    leased = await rig.queue.take("owner", 10, wait_s=0)
    manual.advance(2)
    assert await take(rig) == []
    await rig.queue.finish(leased)
    assert leased[0].task_id == first.task_id
    assert await take(rig) == [second.task_id]


async def test_more_items_fall_due_at_once_than_one_step_handles_and_still_leave_in_order(
    rig: Rig, manual: ManualClock
) -> None:
    items = [item(manual, None, due_in=1 + n / 1000) for n in range(2500)]
    urgent = item(manual, None, priority="high", due_in=5)
    await rig.queue.push([*items, urgent])
    manual.advance(10)
    assert await take(rig, 3) == [urgent.task_id, items[0].task_id, items[1].task_id]


async def test_a_pushed_leased_item_is_queued_anew_and_its_lease_is_void(rig: Rig, manual: ManualClock) -> None:
    pushed = item(manual, "a")
    await rig.queue.push([pushed])
    old = await rig.queue.take("owner", 1, wait_s=0)
    await rig.queue.push([pushed])
    new = await rig.queue.take("owner", 1, wait_s=0)
    assert new[0].task_id == pushed.task_id
    assert new[0].lease != old[0].lease
    await rig.queue.finish(old)
    assert (await rig.queue.places([pushed.task_id]))[pushed.task_id].leased
    await rig.queue.give_back(old)
    assert await take(rig) == [], "the newer lease keeps the lane closed"
    await rig.queue.finish(new)
    assert await rig.queue.entries(None, 10) == []


async def test_an_item_given_back_keeps_its_place(rig: Rig, manual: ManualClock) -> None:
    first, second = item(manual, "a"), item(manual, "a")
    await rig.queue.push([first, second])
    await rig.queue.give_back(await rig.queue.take("owner", 1, wait_s=0))
    assert await rig.queue.lane("a", 10) == [first.task_id, second.task_id]
    assert await take(rig) == [first.task_id]


async def test_crashes_are_counted_and_end_with_the_item(rig: Rig, manual: ManualClock) -> None:
    pushed = item(manual, "a")
    await rig.queue.push([pushed])
    await rig.queue.give_back(await rig.queue.take("owner", 1, wait_s=0), crashed=True)
    await rig.queue.give_back(await rig.queue.take("owner", 1, wait_s=0))
    await rig.queue.give_back(await rig.queue.take("owner", 1, wait_s=0), crashed=True)
    leased = await rig.queue.take("owner", 1, wait_s=0)
    assert leased[0].crashes == 2
    await rig.queue.finish(leased)
    await rig.queue.push([pushed])
    assert (await rig.queue.take("owner", 1, wait_s=0))[0].crashes == 0


async def test_a_lease_that_runs_out_comes_back_and_one_that_is_renewed_does_not(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([lost := item(manual, "a"), kept := item(manual, "b")])
    await rig.queue.renew("dies", 10)
    await rig.queue.renew("lives", 10)
    (old,) = await rig.queue.take("dies", 1, wait_s=0)
    assert await take(rig, 1, "lives") == [kept.task_id]
    manual.advance(9)
    assert await rig.queue.reclaim() == 0
    await rig.queue.renew("lives", 10)
    manual.advance(2)
    assert await rig.queue.reclaim() == 1
    assert await rig.queue.reclaim() == 0
    (again,) = await rig.queue.take("lives", 10, wait_s=0)
    assert (again.task_id, again.crashes) == (lost.task_id, 0)
    await rig.queue.finish([old])
    assert (await rig.queue.places([lost.task_id]))[lost.task_id].leased, "the old lease may not end the new one"


async def test_an_owner_that_takes_before_it_renews_is_not_robbed_at_once(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([item(manual, "a")])
    assert len(await take(rig)) == 1
    assert await rig.queue.reclaim() == 0
    manual.advance(60)
    assert await rig.queue.reclaim() == 1


async def test_a_removed_item_is_not_delivered_but_a_leased_one_stays(rig: Rig, manual: ManualClock) -> None:
    out, waiting, delayed = item(manual, "a"), item(manual, "a"), item(manual, "a", due_in=5)
    await rig.queue.push([out, waiting, delayed])
    leased = await rig.queue.take("owner", 1, wait_s=0)
    await rig.queue.remove([out.task_id, waiting.task_id, delayed.task_id, "unknown"])
    assert await rig.queue.known([out.task_id, waiting.task_id, delayed.task_id]) == {out.task_id}
    await rig.queue.finish(leased)
    manual.advance(10)
    assert await take(rig) == []


async def test_removing_the_head_lets_the_next_one_lead_its_lane(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([head := item(manual, "a", kind="http"), following := item(manual, "a")])
    await rig.queue.remove([head.task_id])
    assert [one.task_id for one in await rig.queue.take("owner", 1, wait_s=0, types=["script"])] == [following.task_id]


async def test_only_types_that_are_asked_for_are_taken(rig: Rig, manual: ManualClock) -> None:
    http, script = item(manual, "a", kind="http", priority="high"), item(manual, "b")
    await rig.queue.push([http, script])
    assert await rig.queue.take("owner", 5, wait_s=0, types=[]) == []
    assert [one.task_id for one in await rig.queue.take("owner", 5, wait_s=0, types=["script", "rpc"])] == [script.task_id]
    assert await rig.queue.take("owner", 5, wait_s=0, types=["script"]) == []
    assert [one.task_id for one in await rig.queue.take("owner", 5, wait_s=0)] == [http.task_id]


# --- the device's lock


async def test_a_lock_of_ours_keeps_the_lane_closed_after_finish_and_its_release_opens_it(
    rig: Rig, manual: ManualClock
) -> None:
    await rig.queue.push([item(manual, "a"), second := item(manual, "a")])
    leased = await rig.queue.take("owner", 1, wait_s=0)
    held = claim("a")
    await rig.locks.acquire([held])
    await rig.queue.finish(leased)
    assert await take(rig) == []
    assert await rig.locks.release([("a", held.execution_id)]) == [True]
    assert await take(rig) == [second.task_id]


async def test_a_lock_released_before_finish_leaves_the_lane_closed_until_then(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([item(manual, "a"), second := item(manual, "a")])
    leased = await rig.queue.take("owner", 1, wait_s=0)
    held = claim("a")
    await rig.locks.acquire([held])
    await rig.locks.release([("a", held.execution_id)])
    assert await take(rig) == []
    await rig.queue.finish(leased)
    assert await take(rig) == [second.task_id]


async def test_a_lock_of_somebody_else_does_not_close_the_lane(rig: Rig, manual: ManualClock) -> None:
    await rig.locks.restore([claim("a", "maintenance until noon")])
    await rig.queue.push([pushed := item(manual, "a")])
    assert await take(rig) == [pushed.task_id]


async def test_a_lock_taken_after_the_lease_was_lost_closes_the_lane(rig: Rig, manual: ManualClock) -> None:
    pushed = item(manual, "a")
    await rig.queue.push([pushed])
    await rig.queue.take("owner", 1, wait_s=0)
    await rig.queue.push([pushed])
    await rig.locks.acquire([claim("a")])
    assert await take(rig) == []


@pytest.mark.parametrize("verb", ["acquire", "restore"])
async def test_a_push_under_a_lock_of_ours_waits(rig: Rig, manual: ManualClock, verb: str) -> None:
    await getattr(rig.locks, verb)([claim("a")])
    await rig.queue.push([item(manual, "a")])
    assert await take(rig) == []


async def test_an_expired_lock_lets_the_lane_open_when_it_is_looked_at(rig: Rig, manual: ManualClock) -> None:
    await rig.locks.acquire([claim("a", ttl_s=5), claim("b", ttl_s=5), claim("c", ttl_s=50)])
    items = [item(manual, device) for device in ("a", "b", "c")]
    await rig.queue.push(items)
    manual.advance(6)
    await rig.queue.reopen(["a", "c", "unknown"])
    assert await take(rig) == [items[0].task_id]
    await rig.queue.reclaim()
    assert await take(rig) == [items[1].task_id]


async def test_finishing_and_giving_back_under_an_old_lease_still_look_at_the_lane(rig: Rig, manual: ManualClock) -> None:
    """The item is gone, the lock has expired: whoever comes by opens the lane."""
    await rig.queue.push([item(manual, "a"), second := item(manual, "a")])
    leased = await rig.queue.take("owner", 1, wait_s=0)
    await rig.locks.acquire([claim("a", ttl_s=5)])
    await rig.queue.finish(leased)
    manual.advance(6)
    await rig.queue.give_back(leased)
    assert await take(rig) == [second.task_id]


# --- what can be seen


async def test_places_count_from_one_among_what_is_due(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, "a") for _ in range(4)]
    later = item(manual, "a", priority="high", due_in=5)
    other = item(manual, "b")
    await rig.queue.push([*items, later, other])
    out = (await rig.queue.take("owner", 1, wait_s=0))[0].task_id
    assert out == items[0].task_id
    places = await rig.queue.places([*(one.task_id for one in items), later.task_id, other.task_id, "unknown"])
    assert [places[one.task_id].position for one in items] == [None, 1, 2, 3]
    assert [places[one.task_id].leased for one in items] == [True, False, False, False]
    assert (places[later.task_id].position, places[later.task_id].due) == (None, False)
    assert (places[other.task_id].position, places[other.task_id].due) == (1, True)
    assert "unknown" not in places
    manual.advance(5)
    places = await rig.queue.places([items[1].task_id, later.task_id])
    assert (places[later.task_id].position, places[items[1].task_id].position) == (1, 2)


async def test_lanes_are_listed_by_device_page_by_page_without_tasks_that_have_none(rig: Rig, manual: ManualClock) -> None:
    devices = ["a", "b", "c", "zürich", "設備"]
    await rig.queue.push([item(manual, device) for device in devices for _ in range(2)])
    await rig.queue.push([item(manual, None), item(manual, "delayed", due_in=5), item(manual, "empty", priority="high")])
    assert [one.device_id for one in await rig.queue.take("owner", 1, wait_s=0)] == ["empty"]
    first = await rig.queue.lanes(None, 2)
    rest = await rig.queue.lanes(first[-1].device_id, 10)
    assert [view.device_id for view in (*first, *rest)] == devices
    assert {view.length for view in (*first, *rest)} == {2}
    assert await rig.queue.lanes("設備", 10) == []


async def test_a_lane_shows_what_waits_first_one_first(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, "a") for _ in range(3)]
    await rig.queue.push([*reversed(items), item(manual, "a", due_in=9)])
    assert await rig.queue.lane("a", 2) == [items[0].task_id, items[1].task_id]
    assert await rig.queue.lane("unknown", 2) == []


async def test_ready_counts_due_items_by_priority(rig: Rig, manual: ManualClock) -> None:
    assert await rig.queue.ready() == {"high": 0, "normal": 0, "low": 0}
    await rig.queue.push(
        [item(manual, "a"), item(manual, "a"), item(manual, "b", priority="high"), item(manual, "a", due_in=5)]
    )
    await rig.queue.push([item(manual, None, priority="low")])
    assert await rig.queue.ready() == {"high": 1, "normal": 2, "low": 1}
    await take(rig, 1)
    assert await rig.queue.ready() == {"high": 0, "normal": 2, "low": 1}
    manual.advance(5)
    assert (await rig.queue.ready())["normal"] == 3


async def test_entries_are_all_items_by_id_page_by_page(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, "a"), item(manual, None), item(manual, "b", due_in=9), item(manual, "c")]
    await rig.queue.push(items)
    await take(rig, 1)
    ids = sorted(one.task_id for one in items)
    first = await rig.queue.entries(None, 3)
    assert [*first, *await rig.queue.entries(first[-1], 3)] == ids
    assert await rig.queue.known([*ids, new_id()]) == set(ids)


async def test_empty_batches_do_nothing(rig: Rig) -> None:
    await rig.queue.push([])
    await rig.queue.finish([])
    await rig.queue.give_back([])
    await rig.queue.reopen([])
    await rig.queue.remove([])
    assert await rig.queue.known([]) == set()
    assert await rig.queue.places([]) == {}


async def test_ping_names_what_answers(rig: Rig) -> None:
    assert rig.kind in (await rig.queue.ping()).lower()


# --- waiting


async def asleep(rig: Rig, taking: "asyncio.Task[Any]") -> None:
    """Until the take has looked and found nothing: what is asked after it is answered after it."""
    await asyncio.sleep(0)
    for _ in range(2):
        await rig.queue.known(["unknown"])
    assert not taking.done()


async def test_take_comes_back_empty_when_its_time_is_over(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([item(manual, "a", due_in=100)])
    began = time.monotonic()
    assert await rig.queue.take("owner", 1, wait_s=0.05) == []
    assert 0.04 < time.monotonic() - began < 1


async def test_a_sleeping_take_is_woken_by_a_push(rig: Rig, manual: ManualClock) -> None:
    other = await rig.another()
    pushed = item(manual, "a")
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(other.queue.take("owner", 1, wait_s=20))
        await asleep(other, taking)
        await rig.queue.push([pushed])
        async with asyncio.timeout(5):
            assert [one.task_id for one in await taking] == [pushed.task_id]


@pytest.mark.parametrize("opener", ["finish", "give_back", "release", "force", "remove", "reclaim", "reopen"])
async def test_a_sleeping_take_is_woken_by_whatever_opens_a_lane(rig: Rig, manual: ManualClock, opener: str) -> None:
    other = await rig.another()
    head, following = item(manual, "a", kind="http", priority="high"), item(manual, "a")
    await rig.queue.push([head, following])
    leased = [] if opener == "remove" else await rig.queue.take("dies", 1, wait_s=0)
    held = claim("a", ttl_s=5)
    if opener in ("release", "force", "reopen"):
        await rig.locks.acquire([held])
        await rig.queue.finish(leased)
    openers = {
        "finish": lambda: rig.queue.finish(leased),
        "give_back": lambda: rig.queue.give_back(leased),
        "release": lambda: rig.locks.release([("a", held.execution_id)]),
        "force": lambda: rig.locks.force("a", held.execution_id),
        "remove": lambda: rig.queue.remove([head.task_id]),
        "reclaim": lambda: rig.queue.reclaim(),
        "reopen": lambda: rig.queue.reopen(["a"]),
    }
    types = None if opener in ("give_back", "reclaim") else ["script"]
    taking = asyncio.create_task(other.queue.take("owner", 1, wait_s=20, types=types))
    await asleep(other, taking)
    if opener in ("reclaim", "reopen"):
        manual.advance(60)
    await openers[opener]()
    async with asyncio.timeout(5):
        (got,) = await taking
    assert got.task_id == (head.task_id if types is None else following.task_id)


async def test_a_sleeping_take_learns_of_an_item_due_earlier_than_it_knew(sqlite: Rig) -> None:
    later, sooner = item(sqlite.clock, "a", due_in=30), item(sqlite.clock, "b", due_in=0.15)
    await sqlite.queue.push([later])
    taking = asyncio.create_task(sqlite.queue.take("owner", 1, wait_s=20))
    await asleep(sqlite, taking)
    await (await sqlite.another()).queue.push([sooner])
    async with asyncio.timeout(5):
        (got,) = await taking
    assert got.task_id == sooner.task_id
    assert 0 <= (sqlite.clock.now() - sooner.due_at).total_seconds() < 1, "it slept on"


async def test_a_take_that_is_cancelled_leaves_nothing_in_hand(rig: Rig, manual: ManualClock) -> None:
    """At whatever moment: what it had leased goes back, though its owner lives on."""
    await rig.queue.push([item(manual, f"dev-{n}") for n in range(20)])
    steps = 1.0
    while steps < 3000:  # turns of the loop until it is cancelled: from before its first look to after its answer
        taking = asyncio.create_task(rig.queue.take("owner", 20, wait_s=5))
        for _ in range(int(steps)):
            await asyncio.sleep(0)
        taking.cancel()
        outcome = (await asyncio.gather(taking, return_exceptions=True))[0]
        if isinstance(outcome, list):
            await rig.queue.give_back(outcome)
        assert sum((await rig.queue.ready()).values()) == 20
        steps *= 1.3
    assert len(await take(rig, 50)) == 20


async def test_a_take_that_waits_costs_nothing_also_after_a_ring_for_others(rig: Rig, manual: ManualClock) -> None:
    other = await rig.another()
    await rig.queue.push([item(manual, "a", due_in=100)])
    taking = asyncio.create_task(rig.queue.take("owner", 1, wait_s=0.4, types=["http"]))
    await asleep(rig, taking)
    await other.queue.push([item(manual, "b")])
    began = time.process_time()
    assert await taking == []
    assert time.process_time() - began < 0.1


async def test_many_takers_share_the_lanes(rig: Rig, manual: ManualClock) -> None:
    items = [item(manual, f"dev-{n % 20}") for n in range(60)]
    await rig.queue.push(items)
    out: list[str] = []
    busy: set[str] = set()

    async def work(owner: str) -> None:
        while leased := await rig.queue.take(owner, 3, wait_s=0.05):
            for one in leased:
                assert one.device_id is not None
                assert one.device_id not in busy
                busy.add(one.device_id)
            await asyncio.sleep(0)
            out.extend(one.task_id for one in leased)
            busy.difference_update(one.device_id or "" for one in leased)
            await rig.queue.finish(leased)

    await asyncio.gather(*(work(f"owner-{n}") for n in range(4)))
    assert sorted(out) == sorted(one.task_id for one in items)


async def test_ten_thousand_items_in_one_lane_do_not_slow_the_others(rig: Rig, manual: ManualClock) -> None:
    await rig.queue.push([item(manual, "flood", priority="high") for _ in range(10_000)])
    began = time.monotonic()
    for n in range(50):
        await rig.queue.push([item(manual, f"dev-{n}")])
        leased = await rig.queue.take("owner", 2, wait_s=0)
        assert f"dev-{n}" in [one.device_id for one in leased]
        await rig.queue.finish(leased)
    assert time.monotonic() - began < 1.5, "50 rounds of push, take and finish"
