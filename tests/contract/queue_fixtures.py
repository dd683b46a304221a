"""The fixtures of the contract suites of queue, events, locks, leases and stream (a plugin of each of them)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scriptdispatch.clock import SystemClock
from tests.contract.queue_backends import RIGS, ManualClock, Rig, sqlite_rig


@pytest.fixture
def manual() -> ManualClock:
    """The clock of `rig`, to be moved by hand."""
    return ManualClock()


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path, manual: ManualClock) -> AsyncIterator[Rig]:
    made = await RIGS[request.param](tmp_path, manual).open()
    await made.locks.set_intact()
    yield made
    await made.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Rig]:
    """For what takes several processes: on the real clock."""
    made = await sqlite_rig(tmp_path, SystemClock()).open()
    await made.locks.set_intact()
    yield made
    await made.close()
