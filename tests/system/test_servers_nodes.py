"""Several nodes on the same servers: lanes, leadership, and what becomes of a node's work when it dies (F60, F61)."""

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.crashkit import accepted, end, hit, is_stopped, rows, send
from tests.system.faultkit import again, moves, set_faults
from tests.system.harness import Cluster, Process
from tests.system.proxy import Proxy
from tests.system.serverkit import (
    all_succeeded,
    database,
    installed_on,
    leader,
    load,
    nodes,
    port_of,
    said,
    start_nodes,
    under_way,
    wait_leader,
    wait_workers,
)

pytestmark = pytest.mark.system
Verify = Callable[..., None]
Install = Callable[..., Cluster]
TTL_S, RENEW_S = 3.0, 0.5
QUICK = {"lease_ttl": TTL_S, "heartbeat_interval": RENEW_S, "check_interval": 0.5, "timeout_grace": 1}
USUAL = {"lease_ttl": 10, "heartbeat_interval": 2, "check_interval": 5, "timeout_grace": 1}  # what a node has if not told


@pytest.fixture
def install(tmp_path: Path, mongo_url: str, redis_url: str, pulsar_url: str) -> Iterator[Install]:
    """Lab and web; the test brings its nodes."""
    with ExitStack() as stack:

        def make(duration: str = "0.1", **settings: object) -> Cluster:
            cluster = stack.enter_context(installed_on(tmp_path, mongo_url, redis_url, pulsar_url, **settings))
            cluster.start_lab("--simulate", "--duration", duration, "--devices", "300")
            cluster.start_web()
            return cluster

        yield make


# ------------------------------------------------------------------------------------------------------------ together


def test_lanes_hold_across_two_nodes_and_one_of_them_leads(install: Install, verify: Verify) -> None:
    cluster = install(**QUICK)
    start_nodes(cluster, "node-a", "node-b")
    ids = load(cluster, 50, 5)
    all_succeeded(cluster, ids, 40)
    pushed = [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    for device in range(5):
        mine = ids[device::5]
        assert [task_id for task_id in pushed if task_id in mine] == mine
    shown = nodes(cluster)
    assert {name: row["status"] for name, row in shown.items()} == {"node-a": "alive", "node-b": "alive"}
    assert [row["workers"] for row in shown.values()] == [2, 2]
    assert sorted(row["leader"] for row in shown.values()) == [False, True]
    names = {row["id"]: name for name, row in shown.items()}
    crew = [row for row in cluster.client.get("/workers").json()["items"] if row["status"] == "ready"]
    assert sorted(names[row["node_id"]] for row in crew) == ["node-a", "node-a", "node-b", "node-b"]
    ran_on = {names[cluster.executions(task_id)[0]["node_id"]] for task_id in ids}
    assert ran_on == {"node-a", "node-b"}, "one of them had no part in it"
    verify(cluster, ids, lines_per_execution=5)


# --------------------------------------------------------------------------------------------------- one of them dies


@pytest.mark.slow
def test_what_a_dead_leader_had_not_sent_comes_back_within_20_s_and_ends_on_the_other(
    install: Install, verify: Verify
) -> None:
    cluster = install("0.05", **USUAL)
    [dying] = start_nodes(cluster, "node-a", crash={"node-a": "worker.after_W4=stop*"})
    wait_leader(cluster)
    ids = load(cluster, 120, 60)
    hit(cluster, "worker.after_W4")  # while it is alone: another node might take all of them
    start_nodes(cluster, "node-b")
    died = time.monotonic()
    end(cluster, dying)
    cluster.wait_all(ids, timeout=60)
    took_s = time.monotonic() - died
    all_succeeded(cluster, ids, 1)
    handed_back = [task_id for task_id in ids if len(cluster.executions(task_id)) > 1]
    assert handed_back, "it had nothing in hand"
    for task_id in handed_back:
        assert rows(cluster, task_id) == [("failed", "not_sent"), ("success", "sent")]
    dead, other = nodes(cluster)["node-a"], nodes(cluster)["node-b"]
    assert (dead["status"], other["status"], other["leader"]) == ("offline", "alive", True)
    assert {cluster.task(task_id)["node_id"] for task_id in handed_back} == {other["id"]}
    verify(cluster, ids)
    assert took_s < 20


@pytest.mark.slow
def test_a_node_killed_with_pushes_in_flight_has_none_of_them_repeated(install: Install, verify: Verify) -> None:
    """Those that central control has taken are ended by their logs. Others may wait for their deadline, in doubt."""
    cluster = install("0.3", **USUAL)
    dying, _ = start_nodes(cluster, "node-a", "node-b")
    set_faults(cluster, {"mode": "hang_after_accept", "seconds": 2})
    ids = load(cluster, 200, 100, timeout_seconds=10, retry=again(3))
    under_way(cluster, ids, 60)
    end(cluster, dying)
    set_faults(cluster)
    all_succeeded(cluster, ids, 90, retries=None)
    taken = [entry["execution_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    assert len(set(taken)) == len(taken)
    verify(cluster, ids)


# ------------------------------------------------------------------------------------------------------------- leading


@pytest.mark.slow
def test_f60_a_leader_stopped_past_its_lease_finds_another_and_writes_nothing_over_its_head(
    install: Install, verify: Verify
) -> None:
    """Stopped at the worst moment: it has read which executions are overdue, and is about to close them."""
    cluster = install("0.1", **QUICK)
    set_faults(cluster, {"messages": "silent"})
    [old] = start_nodes(cluster, "node-a", crash={"node-a": "leader.before_T1=stop"})
    name, term = wait_leader(cluster)
    assert name == "node-a"
    [new] = start_nodes(cluster, "node-b")
    ids = load(cluster, 20, 20, timeout_seconds=3, retry=again(1, delay=300))
    assert hit(cluster, "leader.before_T1") == [old.pid]
    cluster.until(lambda: is_stopped(old.pid), 5, "the leader to be stopped")
    name, newer = wait_leader(cluster, other_than="node-a")
    assert (name, newer > term) == ("node-b", True)
    cluster.wait_all(ids, "failed_waiting_retry", timeout=30)
    before = {task_id: cluster.history(task_id) for task_id in ids}
    send(old.pid, signal.SIGCONT)
    cluster.until(lambda: said(old, "stepped down"), 20, "the old leader to step down")
    cluster.until(lambda: nodes(cluster)["node-a"]["status"] == "alive", 20, "it to be one of the nodes again")
    assert said(new, "executions timed out")
    assert said(old, "executions timed out") == []
    assert leader(cluster) == ("node-b", newer)
    for task_id in ids:
        assert cluster.history(task_id) == before[task_id]
        assert moves(cluster, task_id) == ["waiting", "running", "send_success", "failed_waiting_retry"]
        assert [row["outcome"] for row in cluster.executions(task_id)] == ["timeout"]
    with database(cluster) as store:
        assert store["meta"].find_one({"_id": "term"}) == {"_id": "term", "value": newer}
    assert set(accepted(cluster, ids).values()) == {1}
    wait_workers(cluster, old, new)  # and it works again, for the other one
    set_faults(cluster)
    more = load(cluster, 20, 20, first=101)
    all_succeeded(cluster, more, 30)
    verify(cluster, [*ids, *more])


class Watch(threading.Thread):
    """Asks all the time who leads."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster, self._over = cluster, threading.Event()
        self.seen: list[tuple[str, int]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            over = False
            while not over:  # a last look after the word to end: what its test has just seen is among what it saw
                over = self._over.wait(0.02)
                who = leader(self._cluster)
                if who is not None and self.seen[-1:] != [who]:
                    self.seen.append(who)
        except BaseException as error:
            self.error = error

    def end(self) -> list[tuple[str, int]]:
        self._over.set()
        self.join(20)
        assert self.error is None, self.error
        return self.seen


def reigns(*processes: Process) -> dict[int, set[str]]:
    """Who said to lead in which term."""
    found: dict[int, set[str]] = defaultdict(set)
    for process in processes:
        for row in said(process, "leads"):
            found[row["term"]].add(process.name)
    return found


@pytest.mark.slow
def test_f61_of_masters_that_start_at_once_one_leads(install: Install) -> None:
    cluster = install(**QUICK)
    watch = Watch(cluster)
    watch.start()
    started = start_nodes(cluster, "node-a", "node-b", "node-c")
    wait_leader(cluster)
    assert len(watch.end()) == 1
    found = reigns(*started)
    assert len(found) == 1
    assert [len(names) for names in found.values()] == [1]


@pytest.mark.slow
def test_f61_a_redis_that_comes_and_goes_around_renewals_never_makes_two_leaders(
    install: Install, redis_url: str, verify: Verify
) -> None:
    """Each node by its own flapping line: they lose and find it at different times. The web process has a good one."""
    cluster = install("0.05", **QUICK)
    with Proxy(port_of(redis_url)) as left, Proxy(port_of(redis_url)) as right:
        a = cluster.start_node(wait=False, node_name="node-a", queue_url=left.through(redis_url))
        b = cluster.start_node(wait=False, node_name="node-b", queue_url=right.through(redis_url))
        wait_workers(cluster, a, b)
        wait_leader(cluster)
        watch = Watch(cluster)
        watch.start()
        ids = load(cluster, 60, 60, retry=again(3))
        for proxy in (left, right):
            proxy.cut()
            wait_leader(cluster, TTL_S + 3 * RENEW_S + 10, other_than="node-a" if proxy is left else "node-b")
            ids += load(cluster, 20, 20, first=61, retry=again(3))
            proxy.heal()
        left.cut()
        right.cut()
        cluster.until(lambda: leader(cluster) is None, TTL_S + 10, "the last lease to run out")
        left.heal()
        right.heal()
        wait_leader(cluster, TTL_S + 3 * RENEW_S + 10)
        seen = watch.end()
        assert left.fired["cut"] >= 2
        assert right.fired["cut"] >= 2
        all_succeeded(cluster, ids, 60, retries=None)
        verify(cluster, ids)
    terms = [term for _, term in seen]
    assert terms == sorted(set(terms)), seen
    assert len(terms) >= 3
    assert all(len(names) == 1 for names in reigns(a, b).values()), reigns(a, b)
    for node in (a, b):  # each was cut off while it led, and knew by its own clock that it was over
        assert said(node, "stepped down: the lease could not be renewed in time")
