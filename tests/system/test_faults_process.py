"""Workers and masters end, stop and stall after each step of the protocol (F08 to F15, F18, F19, F55).

The tasks are there before the node: so a fault is tied to its task, and a fresh node meets it at once.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

from tests.system.crashkit import (
    accepted,
    fresh_node,
    hit,
    is_stopped,
    kill_node,
    lives,
    outcome,
    replaced,
    rows,
    workers,
)
from tests.system.faultkit import again, installed, lock_of, moves, pushes, set_faults
from tests.system.harness import Cluster

pytestmark = pytest.mark.system
Verify = Callable[..., None]
PUSH_WINDOW_S = 25  # PROTOCOL W6: so long after its stamp a row counts as being pushed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Lab and web; every test brings its node."""
    with installed(tmp_path_factory.mktemp("process"), timeout_grace=1, test_grace_s=2) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.3", "--devices", "400")
        cluster.start_web()
        yield cluster


@pytest.fixture(autouse=True)
def _quiet(shared: Cluster) -> Iterator[None]:
    """Nothing runs when a test makes its tasks, and no switch of the lab is left from the one before."""
    yield
    kill_node(shared)
    set_faults(shared)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """One that no other test of this file uses."""
    counter = getattr(request.config, "_device_counter", 0) + 1
    request.config._device_counter = counter  # type: ignore[attr-defined]
    return f"dev-{counter:03d}"


# --------------------------------------------------------------------------------------- dying before anything was sent


def test_f08_a_master_killed_with_a_task_in_hand_loses_nothing(shared: Cluster, verify: Verify, device: str) -> None:
    task = shared.create(device)
    node = fresh_node(shared, f"master.after_take=kill#{task['id']}", wait=False)
    hit(shared, "master.after_take")
    assert node.wait() == -signal.SIGKILL
    assert (shared.task(task["id"])["status"], shared.executions(task["id"])) == ("waiting", [])
    fresh_node(shared)
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("success", "sent")]
    verify(shared, [task["id"]], lines_per_execution=5)


def test_f09_a_lock_without_an_execution_goes_with_its_worker(shared: Cluster, verify: Verify, device: str) -> None:
    task = shared.create(device)
    fresh_node(shared, f"worker.after_W2=kill#{task['id']}", wait=False)
    hit(shared, "worker.after_W2")
    began = time.monotonic()
    shared.wait_status(task["id"], "success")
    assert time.monotonic() - began < 15
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("success", "sent")]
    verify(shared, [task["id"]], lines_per_execution=5)


def test_f09_the_reconciler_frees_a_lock_whose_node_died_before_the_execution_row(
    shared: Cluster, verify: Verify, device: str
) -> None:
    task = shared.create(device)
    fresh_node(shared, f"worker.after_W2=stop#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.after_W2")
    kill_node(shared)
    left_over = lock_of(shared, device)
    assert left_over is not None
    assert not lives(pid)
    fresh_node(shared)
    shared.wait_status(task["id"], "success", timeout=30)
    [row] = shared.executions(task["id"])
    assert row["id"] != left_over
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    verify(shared, [task["id"]], lines_per_execution=5)


@pytest.mark.parametrize("place", ["worker.after_W3", "worker.after_W4", "worker.before_W5"])
def test_f10_a_worker_killed_before_the_point_of_no_return_hands_back_at_no_cost(
    shared: Cluster, verify: Verify, device: str, place: str
) -> None:
    task = shared.create(device)
    fresh_node(shared, f"{place}=kill#{task['id']}", wait=False)
    hit(shared, place)
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    first, second = sorted(shared.executions(task["id"]), key=lambda row: row["attempt"])
    assert (first["status"], first["push"], first["error"]["code"]) == ("failed", "not_sent", "SYSTEM_ERROR")
    assert (second["status"], second["push"]) == ("success", "sent")
    assert second["fencing_token"] > first["fencing_token"]
    begun = ["waiting", "running"] if place != "worker.after_W3" else []
    assert moves(shared, task["id"]) == [*begun, "waiting", "running", "send_success", "success"]
    verify(shared, [task["id"]])


def test_f10_a_node_that_died_before_its_second_heartbeat_had_named_its_workers(
    shared: Cluster, verify: Verify, device: str
) -> None:
    """Who buries it finds their executions by that, at once and not only when they are a minute old."""
    task = shared.create(device)
    fresh_node(shared, f"worker.after_W4=stop#{task['id']}", wait=False, heartbeat_interval=30, lease_ttl=60)
    hit(shared, "worker.after_W4")
    kill_node(shared)
    fresh_node(shared)
    shared.wait_status(task["id"], "success")
    first, _ = sorted(shared.executions(task["id"]), key=lambda row: row["attempt"])
    assert (first["status"], first["push"], first["error"]["message"]) == ("failed", "not_sent", "node node-a died")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    nodes = shared.client.get("/nodes").json()["items"]
    assert [row["status"] for row in nodes].count("alive") == 1  # its lease would hold for a minute
    verify(shared, [task["id"]])


def test_a_node_that_died_after_closing_a_row_leaves_the_rest_to_the_next_leader(shared: Cluster, verify: Verify) -> None:
    """K1 done and not K2, in one worker; K2 done and not K3, in the other."""
    devices = ["dev-080", "dev-081"]
    set_faults(shared, {"mode": "status", "status": 422, "devices": devices})
    closed, settled = (shared.create(device)["id"] for device in devices)
    faults = f"worker.after_K1=stop#{closed},worker.after_K2=stop#{settled}"
    fresh_node(shared, faults, wait=False, worker_capacity=1)
    hit(shared, "worker.after_K1")
    hit(shared, "worker.after_K2")
    kill_node(shared)
    assert [shared.task(task_id)["status"] for task_id in (closed, settled)] == ["running", "failed"]
    assert None not in [lock_of(shared, device) for device in devices]
    fresh_node(shared)
    shared.wait_all([closed, settled], "failed")
    assert outcome(shared, closed) == outcome(shared, settled) == ("failed", 0, 0)
    shared.until(lambda: [lock_of(shared, device) for device in devices] == [None, None], 20, "both devices to be free")
    verify(shared, [closed, settled])


# ---------------------------------------------------------------------------------- dying when it may have been sent


def test_f11_a_worker_killed_after_the_push_is_not_repeated_and_the_log_ends_the_task(
    shared: Cluster, verify: Verify, device: str
) -> None:
    set_faults(shared, {"messages": "silent", "devices": [device]})
    task = shared.create(device)
    fresh_node(shared, f"worker.after_W6=kill#{task['id']}", wait=False)
    hit(shared, "worker.after_W6")
    unclear = shared.wait_status(task["id"], "send_success")
    assert unclear["push"] == "unknown"
    [row] = shared.executions(task["id"])
    assert lock_of(shared, device) == row["id"]
    shared.wait_ready()
    about = {"execution_id": row["id"], "task_id": task["id"], "device_id": device}
    answer = shared.client.post(
        "/execution-logs", json={"messages": [{**about, "seq": 1, "type": "SUCCESS", "exit_code": 0}]}
    )
    assert answer.status_code == 202, answer.text
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("success", "sent")]
    shared.until(lambda: lock_of(shared, device) is None, 10, "the closer to free the lock")
    verify(shared, [task["id"]])


def test_f12_a_worker_that_wakes_up_before_its_clock_check_sends_nothing(
    shared: Cluster, verify: Verify, device: str
) -> None:
    """Not declared dead meanwhile: its own "not sent" hands the task back, at no cost."""
    task = shared.create(device)
    slow = {"heartbeat_interval": 5, "lease_ttl": 30}
    fresh_node(shared, f"worker.before_W6=stop#{task['id']}", wait=False, **slow)
    [pid] = hit(shared, "worker.before_W6")
    stamped = time.monotonic()
    shared.until(lambda: is_stopped(pid), 5, "the worker to be stopped")
    shared.until(lambda: time.monotonic() - stamped > 5.5, 10, "the stamp to be too old")
    os.kill(pid, signal.SIGCONT)
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    assert rows(shared, task["id"]) == [("failed", "not_sent"), ("success", "sent")]
    assert pushes(shared, task["id"])[0]["execution_id"] == shared.task(task["id"])["execution_id"]
    verify(shared, [task["id"]])


def test_f12_a_worker_declared_dead_that_wakes_up_before_its_clock_check_sends_nothing(
    shared: Cluster, verify: Verify, device: str
) -> None:
    """Its node was buried: the task is `send_success`, unclear. "Not sent" then costs a retry."""
    task = shared.create(device, retry=again(1))
    node = fresh_node(shared, f"worker.before_W6=stop#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.before_W6")
    stamped = time.monotonic()
    node.kill()
    shared.start_node()
    unclear = shared.wait_status(task["id"], "send_success")
    assert unclear["push"] == "unknown"
    held = lock_of(shared, device)
    assert held == unclear["execution_id"]
    shared.until(lambda: time.monotonic() - stamped > 5.5, 10, "the stamp to be too old")
    os.kill(pid, signal.SIGCONT)
    shared.wait_status(task["id"], "success")
    assert outcome(shared, task["id"]) == ("success", 1, 1)
    assert rows(shared, task["id"]) == [("failed", "not_sent"), ("success", "sent")]
    assert held not in [entry["execution_id"] for entry in pushes(shared, task["id"])]
    shared.until(lambda: not lives(pid), 20, "the orphan to end by itself")
    verify(shared, [task["id"]])


def test_f12_a_worker_declared_dead_that_wakes_up_after_its_clock_check_makes_the_one_push(
    shared: Cluster, verify: Verify, device: str
) -> None:
    task = shared.create(device)
    other = shared.create(device)
    node = fresh_node(shared, f"worker.in_W6=stop#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.in_W6")
    node.kill()
    shared.start_node()
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


# ------------------------------------------------------------------------------------------------- stalled, half dead


def test_f13_a_worker_whose_loop_is_blocked_is_replaced_and_the_others_go_on(shared: Cluster, verify: Verify) -> None:
    stuck = shared.create("dev-101")
    node = fresh_node(shared, f"worker.after_W1=spin:60#{stuck['id']}", wait=False)
    [pid] = hit(shared, "worker.after_W1")
    ids = shared.create_many([shared.body(f"dev-{102 + i}") for i in range(40)])
    # The other worker goes on while this one is stuck, and the master's heartbeat with it.
    shared.until(lambda: sum(accepted(shared, ids).values()) >= 10, 10, "others to be pushed")
    lag = _heartbeat_age(shared)
    shared.until(lambda: not lives(pid), 10, "the stuck worker to be killed")
    shared.wait_all([stuck["id"], *ids], "success")
    assert lag < 2
    assert set(accepted(shared, [stuck["id"], *ids]).values()) == {1}
    assert {task["retry_count"] for task in map(shared.task, [stuck["id"], *ids])} == {0}
    assert node.alive()
    verify(shared, [stuck["id"], *ids], lines_per_execution=5)


def _heartbeat_age(cluster: Cluster) -> float:
    """In seconds: is the master's loop on time?"""
    alive = [row for row in cluster.client.get("/nodes").json()["items"] if row["status"] == "alive"]
    newest = max(datetime.fromisoformat(row["last_heartbeat_at"]) for row in alive)
    return (datetime.now(UTC) - newest).total_seconds()


def test_f14_half_a_message_of_a_killed_worker_is_not_processed(shared: Cluster, verify: Verify, device: str) -> None:
    task = shared.create(device)
    node = fresh_node(shared, f"worker.in_message=kill#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.in_message")
    began = time.monotonic()
    replaced(shared, pid, 2, 10)
    assert time.monotonic() - began < 5
    shared.wait_status(task["id"], "success")
    assert node.alive()
    assert outcome(shared, task["id"]) == ("success", 0, 1)
    verify(shared, [task["id"]], lines_per_execution=5)


def test_f15_a_worker_stopped_inside_a_message_holds_up_nobody(shared: Cluster, verify: Verify, device: str) -> None:
    task = shared.create(device)
    node = fresh_node(shared, f"worker.in_message=stop#{task['id']}", wait=False)
    [pid] = hit(shared, "worker.in_message")
    others = shared.create_many([shared.body(f"dev-{150 + i}") for i in range(10)])
    shared.until(lambda: sum(accepted(shared, others).values()) >= 3, 10, "others to be pushed")
    assert _heartbeat_age(shared) < 2
    shared.until(lambda: not lives(pid), 10, "the stopped worker to be killed")
    shared.wait_all([task["id"], *others], "success")
    assert node.alive()
    assert set(accepted(shared, [task["id"], *others]).values()) == {1}
    verify(shared, [task["id"], *others], lines_per_execution=5)


# ---------------------------------------------------------------------------------------------- poison, failing spawns


@pytest.mark.parametrize(
    ("place", "executions"),
    [("worker.after_W1", []), ("worker.after_W2", []), ("worker.after_W4", [("failed", "not_sent")] * 3)],
    ids=["before any row", "with the lock in hand", "with a row"],
)
def test_f18_a_task_that_kills_its_workers_fails_after_three_and_the_others_flow(
    shared: Cluster, verify: Verify, device: str, place: str, executions: list[Any]
) -> None:
    task = shared.create(device)
    behind = shared.create(device)
    fresh_node(shared, f"{place}=kill*#{task['id']}", wait=False)
    others = shared.create_many([shared.body(f"dev-{170 + i}") for i in range(10)])
    poisoned = shared.wait_status(task["id"], "failed", timeout=45)
    assert (poisoned["error"]["code"], poisoned["retry_count"]) == ("SYSTEM_ERROR", 0)
    assert "3 times" in poisoned["error"]["message"]
    assert len(hit(shared, place)) == 3
    assert rows(shared, task["id"]) == executions
    shared.wait_all([behind["id"], *others], "success", timeout=30)
    assert accepted(shared, [task["id"]]) == {task["id"]: 0}
    assert set(accepted(shared, [behind["id"], *others]).values()) == {1}
    verify(shared, [task["id"], behind["id"], *others])


def test_f19_workers_that_cannot_start_are_tried_ever_more_slowly(shared: Cluster) -> None:
    kill_node(shared)
    node = fresh_node(shared, "child.start=exit:3*#worker", wait=False)

    def told() -> str | None:
        text = shared.client.get(shared.url + "/readyz").text
        return text if "workers failed workers keep dying" in text else None

    shared.until(told, 15, "the health check to be red")
    began, tries = time.monotonic(), len(hit(shared, "child.start"))
    shared.until(lambda: time.monotonic() - began > 3, 10, "three seconds to pass")
    assert len(hit(shared, "child.start")) - tries <= 8  # two at a time: 0.25, 0.5, 1, 2, 4 s
    assert node.alive()
    problems = [
        p for row in shared.client.get("/nodes").json()["items"] if row["status"] == "alive" for p in row["problems"]
    ]
    assert any("exit code 3" in problem for problem in problems)


def test_f19_a_machine_without_file_handles_recovers_when_it_has_some_again(
    shared: Cluster, verify: Verify, device: str
) -> None:
    node = fresh_node(shared)
    limits = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    for pid in workers(shared):
        os.kill(pid, signal.SIGKILL)
    task = shared.create(device)
    try:
        shared.until(
            lambda: "could not be started" in shared.client.get(shared.url + "/readyz").text,
            20,
            "the health check to be red",
        )
        assert node.alive()
        assert workers(shared) == []
        assert shared.task(task["id"])["status"] == "waiting"
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, limits)
    shared.wait_status(task["id"], "success", timeout=45)
    shared.until(lambda: "workers ok 2 ready" in shared.client.get(shared.url + "/readyz").text, 30, "it to be green again")
    verify(shared, [task["id"]])


# --------------------------------------------------------------------------------------------------- inside a transaction


def test_f55_a_writer_killed_inside_a_transaction_leaves_the_file_free_at_once(
    shared: Cluster, verify: Verify, device: str
) -> None:
    task = shared.create(device, retry=again(2), timeout_seconds=1)
    fresh_node(shared, "sqlite.in_transaction=kill@3#worker", wait=False)
    hit(shared, "sqlite.in_transaction")
    began = time.monotonic()
    other = shared.create("dev-190")
    assert time.monotonic() - began < 3
    shared.wait_all([task["id"], other["id"]], "success", timeout=60)
    assert accepted(shared, [task["id"], other["id"]]) == {task["id"]: 1, other["id"]: 1}
    verify(shared, [task["id"], other["id"]])


@pytest.mark.slow
def test_f55_a_writer_stopped_inside_a_transaction_is_killed_and_meanwhile_the_api_says_503(
    shared: Cluster, verify: Verify, device: str
) -> None:
    task = shared.create(device, retry=again(2), timeout_seconds=1)
    # Silent for 6.5 s: longer than the API waits for the file.
    fresh_node(shared, "sqlite.in_transaction=stop@3#worker", wait=False, heartbeat_interval=1.3)
    [pid] = hit(shared, "sqlite.in_transaction")
    began = time.monotonic()
    shared.until(lambda: is_stopped(pid), 5, "it to be stopped")
    answer = shared.client.post("/tasks", json=shared.body("dev-191"))
    assert answer.status_code == 503, (answer.text, time.monotonic() - began, is_stopped(pid))
    assert answer.json()["code"] == "store_unavailable"
    assert 4 < time.monotonic() - began < 9
    assert shared.client.get(f"/tasks/{task['id']}").status_code == 200  # reading goes on
    shared.until(lambda: not lives(pid), 20, "the stopped worker to be killed by its master")
    assert time.monotonic() - began < 15
    other = shared.create("dev-192")
    shared.wait_all([task["id"], other["id"]], "success", timeout=60)
    assert accepted(shared, [task["id"], other["id"]]) == {task["id"]: 1, other["id"]: 1}
    verify(shared, [task["id"], other["id"]])


# ------------------------------------------------------------------------------------------------------------ the sweep

DONE, UNSENT, REFUSED = ("success", "sent"), ("failed", "not_sent"), ("failed", "refused")
# What becomes of a task whose worker dies right after each step: (status, retry_count, pushes), and its executions.
SWEEP: dict[str, tuple[tuple[str, int, int], list[tuple[str, str]]]] = {
    "W1": (("success", 0, 1), [DONE]),
    "W2": (("success", 0, 1), [DONE]),
    "W3": (("success", 0, 1), [UNSENT, DONE]),
    "W4": (("success", 0, 1), [UNSENT, DONE]),
    "W5": (("success", 1, 1), [("failed", "unknown"), DONE]),  # perhaps sent: only the deadline ends it
    "W6": (("success", 0, 1), [DONE]),
    "W7": (("success", 0, 1), [DONE]),
    "K1": (("failed", 0, 0), [REFUSED]),
    "K2": (("failed", 0, 0), [REFUSED]),
    "K3": (("failed", 0, 0), [REFUSED]),
    "W9": (("canceled", 0, 0), [UNSENT]),
}
GROUPS = [["W4", "W5", "W6"], ["W1", "W2", "W3"], ["W7", "K1", "K2"], ["K3", "W9"]]  # of few: more would be slowed down


class Swept(NamedTuple):
    tasks: dict[str, str]  # step -> the task that met it
    late: str  # a task whose first push is past its deadline
    asleep: int  # the pid of its first worker


@pytest.fixture(scope="module")
def swept(shared: Cluster) -> Swept:
    """All that needs a deadline to pass, at the same time. One node for each group; each worker has one task at a time."""
    met: dict[str, str] = {}
    kill_node(shared)
    late = shared.create("dev-399", timeout_seconds=10, retry=again(1))["id"]
    node = fresh_node(shared, f"worker.in_W6=stop#{late}", wait=False)
    [asleep] = hit(shared, "worker.in_W6")
    node.kill()  # not its worker
    for group in GROUPS:
        kill_node(shared)
        devices = {step: f"dev-{300 + list(SWEEP).index(step)}" for step in group}
        refusing = [devices[step] for step in group if step.startswith("K")]
        set_faults(shared, {"mode": "status", "status": 422, "devices": refusing})
        made = {s: shared.create(devices[s], timeout_seconds=10, retry=again(1))["id"] for s in group}
        faults = [f"worker.after_{step}=kill#{task_id}" for step, task_id in made.items()]
        if "W9" in made:
            faults.append(f"worker.after_W3=delay:2000#{made['W9']}")
        fresh_node(shared, ",".join(faults), wait=False, worker_capacity=1)
        if "W9" in made:
            hit(shared, "worker.after_W3")
            assert shared.client.post(f"/tasks/{made['W9']}/cancel", json={}).status_code == 200
        for step in group:
            hit(shared, f"worker.after_{step}")
        shared.wait_all([task_id for step, task_id in made.items() if step != "W5"], timeout=30)
        met |= made
    fresh_node(shared)
    shared.wait_all([late, *met.values()], timeout=PUSH_WINDOW_S + 30)
    return Swept(met, late, asleep)


@pytest.mark.slow
@pytest.mark.parametrize("step", SWEEP)
def test_a_worker_killed_after_each_step_leaves_the_task_where_the_protocol_says(
    swept: Swept, shared: Cluster, verify: Verify, step: str
) -> None:
    task_id = swept.tasks[step]
    assert (outcome(shared, task_id), rows(shared, task_id)) == SWEEP[step]
    verify(shared, [task_id])


@pytest.mark.slow
def test_f12_a_push_past_the_deadline_is_refused_by_its_fence_and_leaves_the_newer_execution_alone(
    swept: Swept, shared: Cluster, verify: Verify
) -> None:
    """The documented window: stopped after the clock check, given up at the deadline, awake after the next execution."""
    first, second = sorted(shared.executions(swept.late), key=lambda row: row["attempt"])
    assert (first["status"], first["error"]["code"], first["push"]) == ("failed", "TIMEOUT", "unknown")
    assert second["status"] == "success"
    assert is_stopped(swept.asleep)
    os.kill(swept.asleep, signal.SIGCONT)
    [late] = shared.until(lambda: pushes(shared, swept.late, "refused"), 10, "the late push")
    assert (late["execution_id"], late["reason"]) == (first["id"], "stale_fence")
    shared.until(lambda: not lives(swept.asleep), 20, "the orphan to end by itself")
    assert sorted(shared.executions(swept.late), key=lambda row: row["attempt"]) == [first, second]
    assert outcome(shared, swept.late) == ("success", 1, 1)
    assert lock_of(shared, "dev-399") is None
    verify(shared, [swept.late])
