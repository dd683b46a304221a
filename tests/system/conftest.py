"""Fixtures of the system tests: an installation of real processes per test, ended with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.checker import Checker
from tests.system.harness import Cluster, on_servers

both_stacks = pytest.mark.parametrize("stack", ["sqlite", "servers"], indirect=True)


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> dict[str, str]:
    """What the installation runs on: one SQLite file, unless a test asks for `both_stacks`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return {}
    return on_servers(*(request.getfixturevalue(name) for name in ("mongo_url", "redis_url", "pulsar_url")))


@pytest.fixture
def make_cluster(tmp_path: Path, stack: dict[str, str]) -> Iterator[Callable[..., Cluster]]:
    """`make_cluster(**settings)`; nothing is started yet."""
    made: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        folder = tmp_path / f"c{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, **{**stack, **settings}))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def verify() -> Callable[..., None]:
    """The independent checker, on a cluster and the ids that its API accepted."""

    def run(cluster: Cluster, task_ids: list[str], **options: Any) -> None:
        Checker(cluster.url, cluster.folder / "lab" / "ledger.jsonl", **options).verify(task_ids)

    return run
