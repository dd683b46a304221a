"""The faults that matter most, again on MongoDB, Redis and Pulsar (F01, F11, F12, F16, F31, F36, F40, F42).

F21, F22 and F60 are in test_servers_redis.py, tests/contract/test_redis_faults.py and test_servers_nodes.py; F38 and F62 run
on both stacks where they are. A node that was killed is recognised by its lease here, which takes its time.
"""

import http.server
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.system.crashkit import accepted, every_child, fresh_node, hit, is_stopped, kill_node, lives, outcome, rows
from tests.system.faultkit import ONCE, fired, lines, message, moves, note_end, publish, pushes, set_faults
from tests.system.harness import Cluster, pages
from tests.system.serverkit import all_succeeded, installed_on, load, lock_of, open_rows, stored

pytestmark = pytest.mark.system
Verify = Callable[..., None]
LEASE_S = 2.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, mongo_url: str, redis_url: str, pulsar_url: str) -> Iterator[Cluster]:
    """Lab and web; every test brings its node."""
    folder, quick = tmp_path_factory.mktemp("starred"), {"lease_ttl": LEASE_S, "timeout_grace": 1, "test_grace_s": 2}
    with installed_on(folder, mongo_url, redis_url, pulsar_url, **quick) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.2", "--devices", "600")
        cluster.start_web()
        yield cluster


@pytest.fixture(autouse=True)
def _quiet(shared: Cluster) -> Iterator[None]:
    yield
    kill_node(shared)
    set_faults(shared)


def test_f01_a_task_whose_web_process_died_before_the_queue_push_is_found_and_run(shared: Cluster, verify: Verify) -> None:
    fresh_node(shared)
    assert shared.web is not None
    shared.web.kill()
    web = shared.start_web(crash="web.after_insert=kill")
    with pytest.raises(httpx.TransportError):
        shared.client.post("/tasks", json=shared.body("dev-001"))
    died = time.monotonic()
    assert web.wait() == -signal.SIGKILL
    assert shared.fired("web.after_insert")
    [task_id] = stored(shared, "dev-001")
    shared.start_web()
    shared.wait_status(task_id, "success")
    assert time.monotonic() - died < 10
    assert outcome(shared, task_id) == ("success", 0, 1)
    assert moves(shared, task_id) == ["waiting", "running", "send_success", "success"]
    verify(shared, [task_id], lines_per_execution=5)


def test_f11_a_worker_killed_after_the_push_is_not_repeated_and_the_log_ends_the_task(
    shared: Cluster, verify: Verify
) -> None:
    device = "dev-002"
    set_faults(shared, {"messages": "silent", "devices": [device]})
    task = shared.create(device)
    fresh_node(shared, f"worker.after_W6=kill#{task['id']}", wait=False)
    hit(shared, "worker.after_W6")
    assert shared.wait_status(task["id"], "send_success")["push"] == "unknown"
    [row] = shared.executions(task["id"])
    assert lock_of(shared, device) == row["id"]
    note_end(shared, row)
    publish(shared, message(row, "SUCCESS", seq=1, exit_code=0))
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("success", "sent")]
    shared.until(lambda: lock_of(shared, device) is None, 10, "the closer to free the lock")
    verify(shared, [task["id"]])


def test_f12_a_worker_declared_dead_that_wakes_up_after_its_clock_check_makes_the_one_push(
    shared: Cluster, verify: Verify
) -> None:
    device = "dev-003"
    task, other = shared.create(device), shared.create(device)
    node = fresh_node(shared, f"worker.in_W6=stop#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.in_W6")
    shared.until(lambda: is_stopped(pid), 5, "the worker to be stopped")
    node.kill()
    shared.start_node(node_name="node-b")
    unclear = shared.wait_status(task["id"], "send_success")
    assert (unclear["push"], lock_of(shared, device)) == ("unknown", unclear["execution_id"])
    assert shared.task(other["id"])["status"] == "waiting"
    assert pushes(shared, task["id"]) == []
    os.kill(pid, signal.SIGCONT)
    shared.wait_all([task["id"], other["id"]], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("success", "sent")]
    shared.until(lambda: not lives(pid), 20, "the orphan to end by itself")
    verify(shared, [task["id"], other["id"]])


@pytest.mark.slow
def test_f16_a_master_killed_with_500_pushes_in_flight_leaves_no_orphan_and_no_second_push(
    shared: Cluster, verify: Verify
) -> None:
    set_faults(shared, {"mode": "hang_after_accept", "seconds": 6})
    ids = load(shared, 500, 500, first=101)
    node = fresh_node(shared)
    shared.until(lambda: sum(accepted(shared, ids).values()) == 500, 40, "500 pushes")
    assert shared.client.get("/tasks", params={"status": "send_success", "limit": 1}).json()["items"] == []
    children = every_child(node)
    began = time.monotonic()
    node.kill()
    more = load(shared, 20, 20, first=11)
    shared.until(lambda: not any(lives(child.pid) for child in children), 25, "the workers to end by themselves")
    assert time.monotonic() - began < 20
    assert (sum(accepted(shared, more).values()), fired(shared)) == (0, [500])
    set_faults(shared)
    shared.start_node(node_name="node-b")
    all_succeeded(shared, [*ids, *more], 60)
    assert open_rows(shared) == 0
    verify(shared, [*ids[::10], *more], lines_per_execution=5)


def test_f31_a_push_taken_without_a_reply_is_not_repeated_and_its_log_ends_it(shared: Cluster, verify: Verify) -> None:
    set_faults(shared, {"mode": "close", "devices": ["dev-004"]})
    fresh_node(shared)
    task = shared.create("dev-004", retry=ONCE)
    shared.wait_status(task["id"], "success")
    assert fired(shared) == [1]
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert len(shared.executions(task["id"])) == 1
    assert lock_of(shared, "dev-004") is None
    verify(shared, [task["id"]], lines_per_execution=5)


def test_f40_a_consumer_killed_between_any_two_steps_ends_each_task_once(shared: Cluster, verify: Verify) -> None:
    """Four deaths over four tasks; what was not acknowledged comes again, to the next consumer."""
    places = ["closer.after_C2", "closer.after_K2", "closer.after_C4", "closer.after_C5"]
    ids = load(shared, 4, 4, first=21)
    fresh_node(shared, ",".join(f"{place}=kill" for place in places), wait=False)
    for place in places:
        hit(shared, place, 60)
    followers = load(shared, 4, 4, first=21)
    all_succeeded(shared, [*ids, *followers], 60)
    for task_id in ids:
        assert moves(shared, task_id).count("success") == 1
        assert sorted(line["seq"] for line in lines(shared, task_id)) == [1, 2, 3, 4, 5]
    assert list(pages(shared.client, "/quarantine", limit=500)) == []
    verify(shared, [*ids, *followers], lines_per_execution=5)


def test_f42_a_result_before_the_worker_stored_send_success_wins(shared: Cluster, verify: Verify) -> None:
    task = shared.create("dev-031")
    fresh_node(shared, f"worker.after_W6=stop#{task['id']}", wait=False, heartbeat_interval=5, lease_ttl=30)
    [pid] = hit(shared, "worker.after_W6")
    shared.until(lambda: is_stopped(pid), 5, "the worker to be stopped")
    shared.wait_status(task["id"], "success")
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    os.kill(pid, signal.SIGCONT)
    follower = shared.create("dev-031")  # after which the worker has come to its W7, and lost it
    shared.wait_status(follower["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert moves(shared, task["id"]) == ["waiting", "running", "success"]
    verify(shared, [task["id"], follower["id"]], lines_per_execution=5)


@pytest.mark.parametrize("order", ["terminal_first", "contradict"])
def test_f42_results_in_the_wrong_order_or_against_each_other_end_it_once(
    shared: Cluster, verify: Verify, order: str
) -> None:
    device = "dev-032" if order == "contradict" else "dev-033"
    set_faults(shared, {"messages": order, "devices": [device], "count": 1})
    fresh_node(shared)
    task = shared.create(device, retry=ONCE)
    shared.wait_status(task["id"], "success", "failed")
    assert fired(shared) == [1]
    ended = shared.task(task["id"])["status"]
    shared.until(lambda: len(lines(shared, task["id"])) == 5, 20, "all lines to be stored")
    follower = shared.create(device)
    shared.wait_status(follower["id"], "success")
    assert shared.task(task["id"])["status"] == ended
    assert [to for to in moves(shared, task["id"]) if to in ("success", "failed")] == [ended]
    verify(shared, [task["id"], follower["id"]])


class Elsewhere:
    """Where a redirect leads to. Must never be asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(dict(self.headers))
                self.send_response(202)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Not into the test's output."""

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/scripts"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _waits_for(cluster: Cluster, task_id: str, reason: str) -> dict[str, Any] | None:
    task = cluster.task(task_id)
    return task if (task["waiting_for"] or {}).get("reason") == reason else None


def test_f36_a_redirect_is_not_followed_and_the_token_goes_nowhere_else(shared: Cluster, verify: Verify) -> None:
    elsewhere = Elsewhere()
    try:
        set_faults(shared, {"mode": "redirect", "location": elsewhere.url, "devices": ["dev-041"]})
        fresh_node(shared, central_token="sekret-of-central-control")
        task = shared.create("dev-041", retry=ONCE)
        shared.until(lambda: fired(shared)[0] >= 1, 20, "the redirect")
        waits = shared.until(lambda: _waits_for(shared, task["id"], "central"), 20, "the task to wait for central control")
        assert waits["status"] == "waiting"
        [first] = shared.executions(task["id"])
        assert (first["status"], first["push"], first["outcome"]) == ("failed", "not_sent", "handed_back")
        assert "which is not followed" in first["error"]["message"]
        assert "sekret" not in str([waits, first, shared.history(task["id"])])
        assert pushes(shared, task["id"]) == []
        set_faults(shared)
        shared.wait_status(task["id"], "success", timeout=40)
        assert outcome(shared, task["id"]) == ("success", 0, 1)
        assert elsewhere.asked == []
        verify(shared, [task["id"]])
    finally:
        elsewhere.close()
