"""Signals and sudden deaths under load: masters, workers, everything at once (F16, F17, F20; HUP, TTIN, TTOU)."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.system.crashkit import accepted, end, every_child, fresh_node, kill_node, lives, ready, replaced, workers
from tests.system.faultkit import again, fired, installed, set_faults, sql
from tests.system.harness import Cluster

pytestmark = pytest.mark.system
Verify = Callable[..., None]
DRAIN_S = 40  # a push that may have been made waits 25 s for its deadline


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Lab and web; every test brings its node."""
    with installed(tmp_path_factory.mktemp("signals"), timeout_grace=1, test_grace_s=2, shutdown_grace=15) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.2", "--devices", "600")
        cluster.start_web()
        yield cluster


@pytest.fixture(autouse=True)
def _quiet(shared: Cluster) -> Iterator[None]:
    yield
    kill_node(shared)
    set_faults(shared)


def load(cluster: Cluster, count: int = 240, devices: int = 60) -> list[str]:
    """Some tasks on each device. Those whose push is unclear end by their deadline and are tried again."""
    body = {"timeout_seconds": 10, "retry": again(3)}
    return cluster.create_many([cluster.body(f"dev-{i % devices + 1:03d}", **body) for i in range(count)])


def under_way(cluster: Cluster, task_ids: list[str], pushed: int = 40) -> None:
    cluster.until(lambda: sum(accepted(cluster, task_ids).values()) >= pushed, 30, f"{pushed} pushes", every=0.02)
    assert sum(accepted(cluster, task_ids).values()) < len(task_ids), "the load was over before the fault"


def all_succeed(cluster: Cluster, task_ids: list[str], timeout: float = DRAIN_S + 30) -> None:
    """And no script ran twice: where there was a second push, the first one had never reached central control, or was
    reported as failed."""
    cluster.wait_all(task_ids, timeout=timeout)
    assert {cluster.task(task_id)["status"] for task_id in task_ids} == {"success"}
    good = [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "result" and entry["type"] == "SUCCESS"]
    assert sorted(task_id for task_id in good if task_id in set(task_ids)) == sorted(task_ids)


def unrecorded(cluster: Cluster) -> int:
    """Open executions of which nobody has noted that central control took them."""
    [[count]] = sql(cluster, "SELECT count(*) FROM task_execution WHERE active = 1 AND coalesce(push, '') <> 'sent'")
    return int(count)


# ---------------------------------------------------------------------------------------------------- deaths under load


@pytest.mark.slow
def test_a_worker_killed_under_load_is_replaced_and_every_task_ends(shared: Cluster, verify: Verify) -> None:
    fresh_node(shared)
    ids = load(shared)
    under_way(shared, ids)
    dead = workers(shared)[0]
    os.kill(dead, signal.SIGKILL)
    assert replaced(shared, dead, 2, 15) < 5
    all_succeed(shared, ids)
    verify(shared, ids)


@pytest.mark.slow
def test_a_master_killed_under_load_and_started_again_loses_nothing(shared: Cluster, verify: Verify) -> None:
    node = fresh_node(shared)
    ids = load(shared)
    under_way(shared, ids)
    children = every_child(node)
    node.kill()
    shared.start_node()
    all_succeed(shared, ids)
    assert not [child.pid for child in children if lives(child.pid)]
    verify(shared, ids)


@pytest.mark.slow
def test_f16_a_master_killed_with_500_pushes_in_flight_leaves_no_orphan_and_no_second_push(
    shared: Cluster, verify: Verify
) -> None:
    set_faults(shared, {"mode": "hang_after_accept", "seconds": 6})
    ids = shared.create_many([shared.body(f"dev-{i + 1:03d}") for i in range(500)])
    node = fresh_node(shared)
    shared.until(lambda: sum(accepted(shared, ids).values()) == 500, 30, "500 pushes")
    assert shared.client.get("/tasks", params={"status": "send_success", "limit": 1}).json()["items"] == []
    children = every_child(node)
    began = time.monotonic()
    node.kill()
    more = shared.create_many([shared.body(f"dev-{i + 501:03d}") for i in range(20)])
    shared.until(lambda: not any(lives(child.pid) for child in children), 25, "the workers to end by themselves")
    assert time.monotonic() - began < 20
    # Each outcome was recorded by the worker that was told of it; nothing new was taken.
    assert unrecorded(shared) == 0
    assert (sum(accepted(shared, more).values()), fired(shared)) == (0, [500])
    set_faults(shared)
    shared.start_node()
    all_succeed(shared, [*ids, *more])
    assert {cluster_task["retry_count"] for cluster_task in map(shared.task, [*ids[::25], *more])} == {0}
    assert set(accepted(shared, [*ids, *more]).values()) == {1}
    verify(shared, [*ids[::10], *more])


@pytest.mark.slow
def test_f20_everything_killed_at_once_under_load_goes_on_where_it_was(shared: Cluster, verify: Verify) -> None:
    node = fresh_node(shared)
    ids = load(shared)
    under_way(shared, ids)
    assert shared.web is not None
    assert shared.lab is not None
    end(shared, node, shared.web, shared.lab)
    shared.start_lab("--simulate", "--duration", "0.2", "--devices", "600")
    shared.start_web()
    shared.start_node()
    all_succeed(shared, ids)
    assert sql(shared, "PRAGMA integrity_check") == [("ok",)]
    verify(shared, ids)


# -------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("numbers", [["TERM"], ["INT"], ["TERM", "TERM", "INT"]], ids=" ".join)
def test_f17_a_node_told_to_stop_under_load_drains_and_exits_with_0(
    shared: Cluster, verify: Verify, numbers: list[str]
) -> None:
    node = fresh_node(shared)
    ids = load(shared)
    under_way(shared, ids)
    children = every_child(node)
    for pid in workers(shared):
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    for name in numbers:
        node.signal(getattr(signal, f"SIG{name}"))
    began = time.monotonic()
    assert node.wait(25) == 0
    assert time.monotonic() - began < 17  # the grace, and a margin
    shared.until(lambda: not any(lives(child.pid) for child in children), 5, "its children to be gone")
    assert unrecorded(shared) == 0
    assert "Traceback" not in node.log.read_text()
    pushed = sum(accepted(shared, ids).values())
    assert pushed < len(ids)
    shared.start_node()
    all_succeed(shared, ids)
    assert set(accepted(shared, ids).values()) == {1}
    assert {task["retry_count"] for task in map(shared.task, ids[::10])} == {0}
    verify(shared, ids[::5])


def test_hup_replaces_the_workers_one_by_one_and_loses_nothing(shared: Cluster, verify: Verify) -> None:
    node = fresh_node(shared)
    old = ready(shared)
    ids = load(shared, 400)
    under_way(shared, ids)
    node.signal(signal.SIGHUP)
    fewest = len(old)

    def all_new() -> bool:
        nonlocal fewest
        now = ready(shared)
        fewest = min(fewest, len(workers(shared)))
        return len(now) == 2 and not set(now) & set(old)

    shared.until(all_new, 30, "all workers to be new ones")
    assert fewest == 2
    assert node.alive()
    all_succeed(shared, ids)
    assert set(accepted(shared, ids).values()) == {1}
    shared.until(lambda: not any(lives(pid) for pid in old), 20, "the old ones to end")
    verify(shared, ids[::5])


def test_ttin_adds_a_worker_and_ttou_takes_one_away_but_never_the_last(shared: Cluster, verify: Verify) -> None:
    node = fresh_node(shared)
    ids = load(shared, 120)
    node.signal(signal.SIGTTIN)
    shared.until(lambda: len(ready(shared)) == 3, 15, "a third worker")
    for left in (2, 1):
        node.signal(signal.SIGTTOU)
        shared.until(lambda left=left: len(workers(shared)) == left, 20, f"{left} workers")  # type: ignore[misc]
    node.signal(signal.SIGTTOU)
    more = load(shared, 30)
    all_succeed(shared, [*ids, *more])
    assert len(workers(shared)) == 1
    assert set(accepted(shared, [*ids, *more]).values()) == {1}
    verify(shared, [*ids[::5], *more])
