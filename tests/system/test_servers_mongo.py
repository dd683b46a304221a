"""mongod dies, stands still, steps down, loses answers, under a running installation (F05, F50 to F53).

One mongod of this file's own; single statements are in tests/contract/test_mongo_*.py.
"""

import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from tests.server_process import Server
from tests.system.crashkit import accepted, kill_node, outcome
from tests.system.faultkit import again, lines, message, moves, note_end, set_faults
from tests.system.harness import Cluster
from tests.system.proxy import Proxy
from tests.system.serverkit import (
    all_succeeded,
    installed_on,
    into_the_topic,
    load,
    open_rows,
    own,
    start_nodes,
    stored,
    under_way,
    wait_workers,
)

pytestmark = pytest.mark.system
Verify = Callable[..., None]
BACK_S = 20  # FAULTS I12: from the restart of mongod until work flows again
UNCLEAR = {"timeout_seconds": 10, "retry": again(3)}  # a push in doubt ends by its deadline


@pytest.fixture(scope="module")
def mongo() -> Iterator[Server]:
    with own("mongo") as server:
        yield server


@pytest.fixture(scope="module")
def shared(mongo: Server, tmp_path_factory: pytest.TempPathFactory, redis_url: str, pulsar_url: str) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("mongo")
    with installed_on(folder, mongo.url, redis_url, pulsar_url, timeout_grace=1, test_grace_s=5) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.1", "--devices", "700")
        cluster.start_web()
        start_nodes(cluster, "node-a")
        yield cluster


@pytest.fixture(autouse=True)
def _healthy(shared: Cluster, mongo: Server) -> Iterator[None]:
    yield
    if not mongo.alive():
        mongo.start()
    mongo.resume()
    set_faults(shared)


def work_flows(cluster: Cluster, device: str, since: float) -> str:
    """A new task runs through, soon enough after the server came back."""

    def created() -> str | None:
        answer = cluster.client.post("/tasks", json=cluster.body(device), headers={"Idempotency-Key": f"flows-{device}"})
        return str(answer.json()["id"]) if answer.status_code == 201 else None

    task_id: str = cluster.until(created, 40, "the API to store again", every=0.2)
    cluster.wait_status(task_id, "success", timeout=40)
    assert time.monotonic() - since < BACK_S
    return task_id


@pytest.mark.slow
def test_f05_a_create_whose_answer_was_lost_is_503_and_its_repeat_finds_the_one_task(
    shared: Cluster, mongo: Server, verify: Verify
) -> None:
    key = {"Idempotency-Key": "f05"}
    assert shared.web is not None
    shared.web.kill()
    with Proxy(mongo.port) as proxy:
        shared.start_web(store_url=proxy.through(str(shared.settings["store_url"])))
        proxy.drop_reply(10_000, match=b"script_task")  # the driver's own repeats, and every look whether it was stored
        began = time.monotonic()
        lost = shared.client.post("/tasks", json=shared.body("dev-001"), headers=key)
        assert (lost.status_code, lost.json()["outcome"]) == (503, "unknown"), lost.text
        assert time.monotonic() - began < 15
        assert proxy.fired["drop_reply"] >= 1
        proxy.heal()
        again_ = shared.client.post("/tasks", json=shared.body("dev-001"), headers=key)
        assert again_.status_code == 201, again_.text
        task_id = again_.json()["id"]
        assert stored(shared, "dev-001") == [task_id]
        shared.wait_status(task_id, "success")
        assert outcome(shared, task_id) == ("success", 0, 1)
        shared.web.kill()
    shared.start_web()
    verify(shared, [task_id], lines_per_execution=5)


@pytest.mark.slow
def test_f50_logs_that_arrive_while_mongod_is_down_are_stored_when_it_is_back(
    shared: Cluster, mongo: Server, verify: Verify
) -> None:
    set_faults(shared, {"messages": "silent"})  # nothing but the pushes, until the store is down
    ids = load(shared, 60, 60, first=101)
    shared.wait_all(ids, "send_success", timeout=40)
    rows = {task_id: shared.executions(task_id)[0] for task_id in ids}
    assert open_rows(shared) == 60
    mongo.kill()
    died = time.monotonic()
    for row in rows.values():
        note_end(shared, row)
    told = [
        [
            *(message(row, "LOG", seq=seq, content=f"line {seq}") for seq in (1, 2, 3)),
            message(row, "SUCCESS", seq=4, exit_code=0),
        ]
        for row in rows.values()
    ]
    into_the_topic(shared, *(each for of_one in told for each in of_one))
    shared.until(lambda: time.monotonic() - died > 15, 30, "15 s without a store")
    assert shared.node is not None
    assert shared.node.alive()
    seen = shared.node.log.read_text().count("\n")
    mongo.start()
    healed = time.monotonic()
    all_succeeded_by_hand(shared, ids)
    assert time.monotonic() - healed < BACK_S
    assert seen < 2000, "a tight loop in the log"
    for task_id in ids:
        assert sorted(line["seq"] for line in lines(shared, task_id)) == [1, 2, 3]
    verify(shared, ids)


def all_succeeded_by_hand(cluster: Cluster, ids: list[str]) -> None:
    """For scripts whose results the test has told."""
    cluster.wait_all(ids, "success", timeout=60)
    assert {cluster.task(task_id)["retry_count"] for task_id in ids} == {0}
    assert set(accepted(cluster, ids).values()) == {1}


@pytest.mark.slow
def test_f51_a_mongod_killed_under_load_loses_nothing_and_doubles_no_transition(
    shared: Cluster, mongo: Server, verify: Verify
) -> None:
    ids = load(shared, 300, 60, first=201, **UNCLEAR)
    for pushed in (40, 150):
        under_way(shared, ids, pushed)
        mongo.restart()
    ids.append(work_flows(shared, "dev-290", time.monotonic()))
    all_succeeded(shared, ids, 90, retries=None)
    verify(shared, ids, lines_per_execution=5)


@pytest.mark.slow
def test_f52_a_mongod_that_stands_still_makes_the_api_say_503_quickly_and_comes_back(
    shared: Cluster, mongo: Server, verify: Verify
) -> None:
    ids = load(shared, 200, 50, first=301, **UNCLEAR)
    under_way(shared, ids, 30)
    mongo.pause()
    began = time.monotonic()
    for path in ("/tasks", f"/tasks/{ids[0]}"):
        asked = time.monotonic()
        answer = shared.client.get(path)
        assert answer.status_code == 503, answer.text
        assert time.monotonic() - asked < 6
    asked = time.monotonic()
    assert shared.client.post("/tasks", json=shared.body("dev-001")).status_code == 503
    assert time.monotonic() - asked < 10
    shared.until(lambda: time.monotonic() - began > 10, 20, "10 s of silence")
    mongo.resume()
    ids.append(work_flows(shared, "dev-390", time.monotonic()))
    all_succeeded(shared, ids, 90, retries=None)
    verify(shared, ids, lines_per_execution=5)


@pytest.mark.slow
def test_f53_a_primary_that_steps_down_under_load_loses_nothing(shared: Cluster, mongo: Server, verify: Verify) -> None:
    ids = load(shared, 300, 60, first=401, **UNCLEAR)
    under_way(shared, ids, 40)
    with MongoClient(mongo.url) as client:
        try:
            client.admin.command("replSetStepDown", 3, force=True)
        except AutoReconnect:
            assert mongo.alive()  # it closes connections as it steps down
    ids.append(work_flows(shared, "dev-490", time.monotonic()))
    all_succeeded(shared, ids, 90, retries=None)
    verify(shared, ids, lines_per_execution=5)


def _lag(cluster: Cluster, timer: str) -> float:
    text = httpx.get(f"{cluster.url}/metrics", timeout=20).text
    return max(float(line.split()[-1]) for line in text.splitlines() if f'tick_lag_seconds{{timer="{timer}"' in line)


@pytest.mark.slow
def test_f63_a_timeout_check_slower_than_its_period_neither_overlaps_nor_is_dropped_and_the_lag_is_shown(
    shared: Cluster, mongo: Server, verify: Verify
) -> None:
    """Each answer of the store takes 0.6 s, the check is due every 0.5 s and needs several of them."""
    set_faults(shared, {"messages": "silent"})
    ids = load(shared, 20, 20, first=501, timeout_seconds=4, retry=again(1, delay=300))
    shared.wait_all(ids, "send_success", timeout=20)
    kill_node(shared)
    with Proxy(mongo.port) as proxy:
        slow = proxy.through(str(shared.settings["store_url"]))
        node = shared.start_node(wait=False, node_name="node-s", store_url=slow)
        wait_workers(shared, node)
        proxy.delay(0.6, "to_client")
        shared.wait_all(ids, "failed_waiting_retry", timeout=40)
        shared.until(lambda: _lag(shared, "leader_check") > 0.3, 30, "the lag to be shown")
        assert proxy.fired["delay"] >= 5
        assert node.alive()
        proxy.heal()
        shared.until(lambda: _lag(shared, "leader_check") < 0.3, 30, "the timer to be on time again")
        for task_id in ids:
            assert moves(shared, task_id) == ["waiting", "running", "send_success", "failed_waiting_retry"]
            assert [row["outcome"] for row in shared.executions(task_id)] == ["timeout"]
        verify(shared, ids)
        kill_node(shared)
    set_faults(shared)
    start_nodes(shared, "node-a")
