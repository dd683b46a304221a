"""The broker dies in the middle of batches; a topic is older than its first consumer (F45, F47)."""

import time
from collections.abc import Callable

import pytest

from scriptdispatch.ids import new_id
from tests.system.crashkit import accepted
from tests.system.faultkit import publish
from tests.system.harness import pages
from tests.system.serverkit import all_succeeded, installed_on, load, open_rows, own, start_nodes, under_way

pytestmark = pytest.mark.system
Verify = Callable[..., None]
BACK_S = 60  # FAULTS I12


@pytest.mark.slow
@pytest.mark.timeout(240)  # a broker may take long to start, and the library's pauses grow meanwhile
def test_f45_a_broker_killed_in_the_middle_of_batches_under_load_loses_and_doubles_no_line(
    tmp_path_factory: pytest.TempPathFactory, mongo_url: str, redis_url: str, verify: Verify
) -> None:
    with own("pulsar") as broker:
        folder = tmp_path_factory.mktemp("pulsar")
        with installed_on(folder, mongo_url, redis_url, broker.url) as cluster:
            cluster.start_lab("--simulate", "--duration", "0.1", "--devices", "100", "--log-lines", "20")
            cluster.start_web()
            [node] = start_nodes(cluster, "node-a")
            ids = load(cluster, 400, 100)
            under_way(cluster, ids, 150)
            broker.kill()
            assert open_rows(cluster) > 0, "nothing was under way"
            said = node.log.stat().st_size
            down = time.monotonic()
            cluster.until(lambda: time.monotonic() - down > 5, 10, "a broker that is away for a while")
            assert node.log.stat().st_size - said < 200_000, "a busy loop in the log"
            assert node.children("consumer")
            broker.start()
            healed = time.monotonic()
            all_succeeded(cluster, ids, BACK_S)
            assert time.monotonic() - healed < BACK_S
            assert set(accepted(cluster, ids).values()) == {1}
            assert list(pages(cluster.client, "/quarantine", limit=500)) == []
            verify(cluster, ids, lines_per_execution=20)


def test_f47_what_was_published_before_the_first_node_ever_started_is_not_lost(
    tmp_path_factory: pytest.TempPathFactory, mongo_url: str, redis_url: str, pulsar_url: str
) -> None:
    """Results of executions that nobody knows: each must turn up in the quarantine."""
    with installed_on(tmp_path_factory.mktemp("backlog"), mongo_url, redis_url, pulsar_url) as cluster:
        cluster.start_lab("--simulate")
        cluster.start_web()
        strangers = [new_id() for _ in range(50)]
        publish(cluster, *({"execution_id": id, "task_id": new_id(), "type": "SUCCESS", "seq": 1} for id in strangers))
        start_nodes(cluster, "node-a")

        def bodies() -> list[str]:
            return [row["body"] for row in pages(cluster.client, "/quarantine", limit=100)]

        cluster.until(lambda: len(bodies()) >= 50, 40, "the backlog to be read")
        found = "\n".join(bodies())
        assert all(id in found for id in strangers)
        assert len(bodies()) == 50
