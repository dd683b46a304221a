"""The stores that the contract suite runs on. A further backend is one more entry in BACKENDS."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scriptdispatch.clock import Clock
from scriptdispatch.sqlite import Database
from scriptdispatch.store.memory import MemoryStore
from scriptdispatch.store.port import Store
from scriptdispatch.store.sqlite import SqliteStore
from tests.contract.mongo_rig import emptied, mongo_database  # noqa: F401  (a fixture)
from tests.contract.store_values import HeldClock

# Makes an unopened store that nobody else uses; whatever it keeps goes into the folder.
BACKENDS: dict[str, Callable[[Path, Clock], Store]] = {
    "memory": lambda folder, clock: MemoryStore(clock),
    "sqlite": lambda folder, clock: SqliteStore(Database(folder / "store.db"), clock),
}


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture(params=[*BACKENDS, "mongo"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: HeldClock) -> AsyncIterator[Store]:
    if request.param == "mongo":
        from scriptdispatch.store.mongo import MongoStore  # an extra: without it the others can be tested all the same

        made: Store = MongoStore(await emptied(request.getfixturevalue("mongo_database")), clock)
    else:
        made = BACKENDS[request.param](tmp_path, clock)
    await made.open()
    yield made
    await made.close()
