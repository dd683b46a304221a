"""What a master says of a child that has ended."""

from typing import Any

import pytest

from scriptdispatch.clock import SystemClock
from scriptdispatch.master.children import Child
from scriptdispatch.master.supervisor import Node
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import connect


def ended(exit_code: int, settings: Settings) -> Child:
    child = Child("consumer", "consumer-1", "node-1", settings, SystemClock(), lambda *_: None, lambda _: None)
    child.exit_code = exit_code
    return child


@pytest.mark.parametrize(("exit_code", "level"), [(0, "info"), (1, "warning"), (-9, "warning")])
async def test_only_a_child_that_ends_badly_is_a_warning(
    exit_code: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(store_url="memory://", workers=1)
    backends = await connect(settings)
    said: list[tuple[str, Any]] = []
    for name in ("info", "warning"):
        monkeypatch.setattr(
            f"scriptdispatch.master.supervisor.log.{name}", lambda *_, at=name, **facts: said.append((at, facts))
        )
    node = Node(settings, backends)
    node._stopping = True
    await node._after_death(ended(exit_code, settings))
    [(at, facts)] = [one for one in said if one[1].get("event_name") == "child.ended"]
    assert (at, facts["how"]) == (level, f"exit code {exit_code}")
    await backends.close()


async def test_a_child_that_has_ended_keeps_its_last_pid() -> None:
    settings = Settings(store_url="memory://")
    child = ended(0, settings)
    child.pid, child._process = 4711, None
    assert child.record("offline").pid == 4711
