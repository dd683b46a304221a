"""R3: tasks whose execution was closed a moment ago follow it, also if whoever closed it died; at a price that a busy
installation can pay every half minute."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.model import Execution
from scriptdispatch.services import reconcile
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.settings import Settings
from scriptdispatch.store.memory import MemoryStore
from scriptdispatch.wiring import Backends, make
from tests.contract.queue_backends import ManualClock
from tests.contract.store_values import get_task, insert_row, insert_task, one, start


class Round:
    """A reconciler whose reads of executions are counted."""

    def __init__(self, backends: Backends, clock: ManualClock) -> None:
        self.backends, self.clock = backends, clock
        self.reconciler = Reconciler(backends, Settings(store_url="memory://"))
        self.asked: list[str] = []
        assert isinstance(backends.store, MemoryStore)
        self.store: Any = backends.store
        executions = self.store.executions

        async def counted(ids: Any) -> Any:
            self.asked += ids
            return await executions(ids)

        self.store.executions = counted

    async def close(self, row: Execution) -> None:
        """K1, and then whoever did it dies."""
        change = lifecycle.close(row, "success", self.clock.now(), closed_by="central", reason="ok")
        assert (await one(self.store, change)).won

    async def started(self) -> Execution:
        task = await insert_task(self.store, device_id=None, next_run_at=self.clock.now())
        _, row = await start(self.store, task)
        return row

    async def sent(self) -> Execution:
        row = await self.started()
        assert (await one(self.store, lifecycle.stamp(row, "worker-1", self.clock.now(), 30))).won
        [row] = await self.store.executions([row.id])
        return row

    async def status(self, row: Execution) -> str:
        return (await get_task(self.store, row.task_id)).status

    async def look(self, after_s: float = 30) -> tuple[int, list[str]]:
        """One round: how many were settled, and which rows were read for it."""
        self.clock.advance(after_s)
        self.asked.clear()
        return await self.reconciler.settle_recent(), list(self.asked)


@pytest.fixture
async def rounds() -> AsyncIterator[Round]:
    clock = ManualClock()
    backends = make(Settings(store_url="memory://"), clock)
    await backends.open()
    yield Round(backends, clock)
    await backends.close()


async def test_a_task_whose_closer_died_after_k1_is_settled_when_the_grace_is_over(rounds: Round) -> None:
    row = await rounds.sent()
    await rounds.close(row)
    assert (await rounds.look(10))[0] == 0, "whoever closed it may be about to"
    assert (await rounds.look(21))[0] == 1
    assert await rounds.status(row) == "success"


async def test_what_was_behind_is_looked_at_once_more_and_what_has_followed_not_again(
    rounds: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "PAGE", 3)
    rows = [await rounds.sent() for _ in range(7)]
    for row in rows:
        await rounds.close(row)
    settled, asked = await rounds.look(31)
    assert (settled, sorted(asked)) == (7, sorted(row.id for row in rows))
    late = await rounds.sent()
    await rounds.close(late)
    settled, asked = await rounds.look(31)
    assert (settled, sorted(asked)) == (1, sorted(row.id for row in [*rows, late]))
    assert await rounds.look(28) == (0, [late.id])
    assert await rounds.look(28) == (0, [])


async def test_one_that_was_never_stamped_is_looked_at_again_for_a_late_start(rounds: Round) -> None:
    """Its worker was declared dead between W3 and W4; the row was handed back, and then W4 landed after all."""
    task = await insert_task(rounds.store, device_id=None, next_run_at=rounds.clock.now())
    row = await insert_row(rounds.store, task)
    change = lifecycle.close_unsent(row, "handed_back", rounds.clock.now(), closed_by="master", reason="dead")
    assert (await one(rounds.store, change)).won
    assert (await rounds.look(31))[0] == 0
    assert (await one(rounds.store, lifecycle.start(task, row, rounds.clock.now()))).won
    assert (await rounds.look(30))[0] == 1
    assert await rounds.status(row) == "waiting"


async def test_a_round_that_fails_is_made_up_for_by_the_next(rounds: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    row = await rounds.sent()
    await rounds.close(row)

    async def away(*_: Any, **__: Any) -> None:
        raise reconcile_error

    reconcile_error = RuntimeError("the store is away")
    with monkeypatch.context() as broken:
        broken.setattr(rounds.store, "commit", away)
        with pytest.raises(RuntimeError):
            await rounds.look(31)
    assert (await rounds.look(timedelta(seconds=30).total_seconds()))[0] == 1
    assert await rounds.status(row) == "success"
