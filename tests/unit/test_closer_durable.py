"""A result that others have dealt with is acknowledged only when that can not be taken back any more."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.model import Execution
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.metrics import Metrics
from scriptdispatch.mq.closer import Closer
from scriptdispatch.mq.port import Delivery
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends, connect
from tests.contract.store_values import NOW, get_row, get_task, insert_task, one, start


class Desk:
    """A script that has ended, its result in hand, and somebody else who has closed it a moment before."""

    def __init__(self, backends: Backends) -> None:
        self.backends, self.store = backends, backends.store
        self.closer = Closer(backends, Settings(store_url="memory://"), Metrics())

    async def ended(self) -> tuple[Execution, Sequence[Delivery]]:
        _, row = await start(self.store, await insert_task(self.store))
        assert (await one(self.store, lifecycle.stamp(row, row.worker_id, NOW, 30))).won
        about = {"execution_id": row.id, "task_id": row.task_id, "device_id": row.device_id}
        body = msgspec.json.encode({**about, "type": "SUCCESS", "seq": 1, "exit_code": 0})
        await self.backends.stream.publish([(row.device_id, body)])
        return await get_row(self.store, row.id), await self.backends.stream.receive(10, 1)

    async def close(self, row: Execution) -> Execution:
        change = lifecycle.close(row, "success", NOW, closed_by="central", reason="central control reports success")
        assert (await one(self.store, change)).won
        return await get_row(self.store, row.id)

    def reopen(self, row: Execution) -> None:
        """As a new primary that never heard of the close."""
        store: Any = self.store
        store._executions[row.id] = row
        store._open[row.id] = None
        store._holder[row.device_id] = row.id


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    backends = await connect(Settings(store_url="memory://"))
    yield Desk(backends)
    await backends.close()


async def test_a_result_that_somebody_else_has_recorded_is_acknowledged(desk: Desk) -> None:
    row, deliveries = await desk.ended()
    await desk.close(row)
    await desk.closer.close_out(deliveries)
    assert await desk.backends.stream.lag() == 0
    assert (await get_task(desk.store, row.task_id)).status == "success"


async def test_one_whose_record_is_taken_back_comes_again_and_is_recorded_anew(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, deliveries = await desk.ended()
    await desk.close(row)

    async def failover(*_: Any) -> None:
        desk.reopen(row)
        monkeypatch.undo()

    monkeypatch.setattr(desk.store, "confirm", failover)
    with pytest.raises(StoreUnavailable):
        await desk.closer.close_out(deliveries)
    assert await desk.backends.stream.lag() == 1
    await desk.closer.close_out(deliveries)
    assert await desk.backends.stream.lag() == 0
    assert (await get_row(desk.store, row.id)).outcome == "success"


async def test_one_that_cannot_be_confirmed_is_not_acknowledged(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    row, deliveries = await desk.ended()
    await desk.close(row)

    async def away(*_: Any) -> None:
        raise StoreUnavailable("no majority", outcome_unknown=True)

    monkeypatch.setattr(desk.store, "confirm", away)
    with pytest.raises(StoreUnavailable):
        await desk.closer.close_out(deliveries)
    assert await desk.backends.stream.lag() == 1
