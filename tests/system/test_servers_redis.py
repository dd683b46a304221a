"""Redis away, standing still, forgetting everything or only its scripts, under a running installation (F02, F22 to F28).

One Redis of this file's own; the faults of single commands are in tests/contract/test_redis_faults.py.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from redis import Redis

from tests.server_process import Server
from tests.system.crashkit import accepted, outcome
from tests.system.faultkit import fired, message, note_end, publish, set_faults
from tests.system.harness import Cluster
from tests.system.serverkit import (
    all_succeeded,
    installed_on,
    leader,
    load,
    lock_of,
    own,
    start_nodes,
    under_way,
    wait_leader,
)

pytestmark = pytest.mark.system
Verify = Callable[..., None]
BACK_S = 15  # FAULTS I12: from the restart of Redis until work flows again


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    """Keeps nothing on disk: killed, it comes back empty."""
    with own("redis") as server:
        yield server


@pytest.fixture(scope="module")
def shared(redis: Server, tmp_path_factory: pytest.TempPathFactory, mongo_url: str, pulsar_url: str) -> Iterator[Cluster]:
    with installed_on(tmp_path_factory.mktemp("redis"), mongo_url, redis.url, pulsar_url, test_grace_s=5) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.1", "--devices", "700")
        cluster.start_web()
        start_nodes(cluster, "node-a")
        yield cluster


@pytest.fixture(autouse=True)
def _healthy(shared: Cluster, redis: Server) -> Iterator[None]:
    yield
    if not redis.alive():
        redis.start()
    redis.resume()
    set_faults(shared)


def test_f02_a_task_created_while_redis_is_away_is_stored_and_runs_when_it_is_back(
    shared: Cluster, redis: Server, verify: Verify
) -> None:
    redis.kill()
    began = time.monotonic()
    answer = shared.client.post("/tasks", json=shared.body("dev-001"))
    assert (answer.status_code, answer.json()["queued"]) == (201, False)
    assert time.monotonic() - began < 10
    task_id = answer.json()["id"]
    assert shared.task(task_id)["status"] == "waiting"
    redis.start()
    healed = time.monotonic()
    shared.wait_status(task_id, "success", timeout=40)
    assert time.monotonic() - healed < BACK_S
    assert outcome(shared, task_id) == ("success", 0, 1)
    verify(shared, [task_id], lines_per_execution=5)


@pytest.mark.slow
def test_f22_an_emptied_redis_gets_its_locks_back_before_anything_is_pushed_to_a_busy_device(
    shared: Cluster, redis: Server, verify: Verify
) -> None:
    """A hundred scripts run, and one task waits behind each."""
    devices = [f"dev-{n:03d}" for n in range(101, 201)]
    set_faults(shared, {"messages": "silent", "devices": devices, "count": 100})
    running = shared.create_many([shared.body(device) for device in devices])
    shared.wait_all(running, "send_success", timeout=40)
    assert fired(shared) == [100]
    waiting = shared.create_many([shared.body(device) for device in devices])
    rows = {device: shared.executions(task_id)[0] for device, task_id in zip(devices, running, strict=True)}
    before = wait_leader(shared)

    redis.restart(wipe=True)
    healed = time.monotonic()
    shared.until(
        lambda: all(lock_of(shared, device) == rows[device]["id"] for device in devices), 40, "every lock to be back"
    )
    assert time.monotonic() - healed < BACK_S
    name, term = wait_leader(shared)
    assert (name, term > before[1]) == (before[0], True)
    free = load(shared, 20, 20, first=201)  # other devices are served again, these are not touched
    all_succeeded(shared, free, 30)
    assert sum(accepted(shared, waiting).values()) == 0
    assert {shared.task(task_id)["status"] for task_id in waiting} == {"waiting"}

    for row in rows.values():
        note_end(shared, row)
    publish(shared, *(message(row, "SUCCESS", seq=1, exit_code=0) for row in rows.values()))
    shared.wait_all(running, "success", timeout=30)
    all_succeeded(shared, waiting, 40)
    for device, task_id in zip(devices, waiting, strict=True):
        [row] = shared.executions(task_id)
        assert row["fencing_token"] == rows[device]["fencing_token"] + 1
    verify(shared, [*running, *waiting, *free])


def expire_lock(cluster: Cluster, redis: Server, device: str) -> None:
    """As time would, if the execution took longer than its lock holds."""
    prefix = f"{cluster.settings['redis_prefix']}{{p0}}:"
    client = Redis.from_url(redis.url, decode_responses=True)
    lock = str(client.hget(f"{prefix}locks", device))
    assert lock.startswith("until=")
    client.hset(f"{prefix}locks", device, f"until=1 {lock.partition(' ')[2]}")
    client.zadd(f"{prefix}lock_ends", {device: 1})


def locks_lost(cluster: Cluster) -> float:
    text = httpx.get(f"{cluster.url}/metrics").text
    return float(re.findall(r"^scriptdispatch_locks_lost_total (\S+)$", text, re.MULTILINE)[0])


def test_f24_a_lock_that_expires_under_a_running_execution_lets_nobody_in_and_raises_the_alarm(
    shared: Cluster, redis: Server, verify: Verify
) -> None:
    device, before = "dev-250", locks_lost(shared)
    set_faults(shared, {"messages": "silent", "devices": [device], "count": 1})
    task = shared.create(device)
    shared.wait_status(task["id"], "send_success")
    [row] = shared.executions(task["id"])
    expire_lock(shared, redis, device)
    follower = shared.create(device)
    shared.until(lambda: lock_of(shared, device) == row["id"], 10, "the store's holder to get its lock back")
    shared.until(lambda: locks_lost(shared) > before, 10, "the alarm")
    assert accepted(shared, [follower["id"]]) == {follower["id"]: 0}
    assert (shared.task(follower["id"])["status"], shared.task(follower["id"])["retry_count"]) == ("waiting", 0)
    note_end(shared, row)
    publish(shared, message(row, "SUCCESS", seq=1, exit_code=0))
    all_succeeded(shared, [follower["id"]], 20)
    assert shared.executions(follower["id"])[0]["fencing_token"] == row["fencing_token"] + 1
    verify(shared, [task["id"], follower["id"]])


@pytest.mark.slow
def test_f22_a_redis_that_is_emptied_again_and_again_under_load_loses_and_doubles_nothing(
    shared: Cluster, redis: Server, verify: Verify
) -> None:
    ids = load(shared, 360, 60, first=301)
    for pushed in (40, 120, 200):
        under_way(shared, ids, pushed)
        if pushed == 120:
            Redis.from_url(redis.url).flushall()  # emptied without a connection being lost
        else:
            redis.restart(wipe=True)
    healed = time.monotonic()
    under_way(shared, ids, sum(accepted(shared, ids).values()) + 1)
    assert time.monotonic() - healed < BACK_S
    all_succeeded(shared, ids, 90)
    for device in range(60):
        fences = [shared.executions(task_id)[0]["fencing_token"] for task_id in ids[device::60]]
        assert fences == sorted(set(fences))
    verify(shared, ids, lines_per_execution=5)


@pytest.mark.slow
def test_f26_a_redis_that_stands_still_pauses_dispatch_while_the_api_answers(
    shared: Cluster, redis: Server, verify: Verify
) -> None:
    ids = load(shared, 240, 40, first=401)
    under_way(shared, ids, 40)
    redis.pause()
    began = time.monotonic()
    created = shared.client.post("/tasks", json=shared.body("dev-450"))
    assert (created.status_code, created.json()["queued"]) == (201, False)
    assert time.monotonic() - began < 12
    assert shared.client.get("/tasks", params={"limit": 1}).status_code == 200
    shared.until(lambda: time.monotonic() - began > 8, 20, "8 s of silence")
    quiet = sum(accepted(shared, ids).values())
    assert quiet < len(ids)
    redis.resume()
    healed = time.monotonic()
    shared.until(lambda: sum(accepted(shared, ids).values()) > quiet, BACK_S, "pushes to go on")
    all_succeeded(shared, [*ids, created.json()["id"]], 60)
    assert time.monotonic() - healed < 40
    verify(shared, [*ids, created.json()["id"]], lines_per_execution=5)


def test_f28_scripts_forgotten_all_the_time_under_load_cost_nothing(shared: Cluster, redis: Server, verify: Verify) -> None:
    ids = load(shared, 300, 60, first=501)
    client = Redis.from_url(redis.url)
    flushed = 0

    def flush_until_done() -> bool:
        nonlocal flushed
        client.script_flush()
        flushed += 1
        return sum(accepted(shared, ids).values()) == len(ids)

    shared.until(flush_until_done, 40, "every task to be pushed", every=0.01)
    assert flushed >= 10
    all_succeeded(shared, ids, 30)
    verify(shared, ids, lines_per_execution=5)


def test_f27_a_node_refuses_a_redis_that_evicts_and_says_so_in_one_line(shared: Cluster, redis: Server) -> None:
    client = Redis.from_url(redis.url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for command in ("serve", "web"):
            ended = subprocess.run(
                [sys.executable, "-m", "scriptdispatch", command],
                env=shared.env(node_name="node-x", port=0, log_level="error"),
                cwd=shared.folder,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            assert ended.returncode not in (0, -9), ended
            [line] = ended.stderr.strip().splitlines()
            assert "maxmemory-policy allkeys-lru" in line
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert leader(shared) is not None
