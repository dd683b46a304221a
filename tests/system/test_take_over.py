"""M3: with a central control that deduplicates, the push of a dead worker that may never have left is posted again."""

from collections.abc import Callable

import pytest

from tests.system.conftest import both_stacks
from tests.system.harness import Cluster

pytestmark = [pytest.mark.system, both_stacks]


@pytest.mark.parametrize("place", ["worker.after_W5", "worker.after_W6"])
def test_an_unclear_push_of_a_dead_worker_is_posted_again_under_its_id(
    make_cluster: Callable[..., Cluster], verify: Callable[..., None], place: str
) -> None:
    """Killed before the first byte it would wait for its deadline; killed after it, central control says "I have it"."""
    cluster = make_cluster(central_deduplicates=True).start(crash=f"{place}=kill", lab=("--simulate", "--duration", "1"))
    task = cluster.create()
    done = cluster.wait_status(task["id"], "success", timeout=30)
    assert cluster.fired(place)
    assert (done["attempt"], done["retry_count"]) == (1, 0)
    accepted = [entry for entry in cluster.ledger() if entry["event"] == "accepted"]
    assert len(accepted) == 1
    [execution] = cluster.executions(task["id"])
    assert execution["push"] == "sent"
