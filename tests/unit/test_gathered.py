"""Reads that arrive together are fetched together, and see what was written before they were asked for."""

import asyncio

import pytest

from scriptdispatch.store.gathered import MAX_BATCH, Gathered


class Shelf:
    def __init__(self) -> None:
        self.things = {str(n): n for n in range(5000)}
        self.fetches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, ids: list[str]) -> dict[str, int]:
        self.fetches.append(ids)
        found = {id: self.things[id] for id in ids if id in self.things}
        await self.gate.wait()
        if "broken" in ids:
            raise RuntimeError("the shelf fell over")
        return found


async def test_a_lone_read_goes_at_once_and_answers_in_order() -> None:
    shelf = Shelf()
    assert await Gathered(shelf.fetch).get(["7", "nothing", "3"]) == [7, None, 3]


async def test_reads_that_come_while_one_is_under_way_share_the_next() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    gathered = Gathered(shelf.fetch)
    reads = [asyncio.create_task(gathered.get(["0"]))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reads += [asyncio.create_task(gathered.get([str(n)])) for n in range(1, 100)]
    await asyncio.sleep(0)
    shelf.gate.set()
    assert await asyncio.gather(*reads) == [[n] for n in range(100)]
    assert [len(ids) for ids in shelf.fetches] == [1, 99]


async def test_a_read_is_not_answered_by_a_fetch_that_began_before_it() -> None:
    shelf = Shelf()
    shelf.gate.clear()
    gathered = Gathered(shelf.fetch)
    first = asyncio.create_task(gathered.get(["1"]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    shelf.things["1"] = 111
    second = asyncio.create_task(gathered.get(["1"]))
    await asyncio.sleep(0)
    shelf.gate.set()
    assert (await first, await second) == ([1], [111])


async def test_batches_are_bounded_and_a_failure_reaches_all_of_its_batch_only() -> None:
    shelf = Shelf()
    gathered = Gathered(shelf.fetch)
    many = [asyncio.create_task(gathered.get([str(n)])) for n in range(MAX_BATCH + 10)]
    await asyncio.gather(*many)
    assert max(len(ids) for ids in shelf.fetches) <= MAX_BATCH
    with pytest.raises(RuntimeError, match="fell over"):
        await gathered.get(["broken"])
    assert await gathered.get(["5"]) == [5]
