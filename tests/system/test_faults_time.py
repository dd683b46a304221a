"""Deadlines, races of a result with whoever else ends an execution, and what the reconciler mends (F62, T1, R1 to R5, B)."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from scriptdispatch.ids import new_id
from tests.system.conftest import both_stacks
from tests.system.faultkit import (
    FAST,
    ONCE,
    again,
    fired,
    installed,
    lines,
    lock_of,
    message,
    moves,
    note_end,
    publish,
    pushes,
    set_faults,
    sql,
)  # fmt: skip
from tests.system.harness import Cluster

pytestmark = pytest.mark.system
Make = Callable[..., Cluster]
Verify = Callable[..., None]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with installed(tmp_path_factory.mktemp("time"), timeout_grace=1) as cluster:
        yield cluster.start(lab=("--simulate", "--duration", "0.3", "--devices", "200"))


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "shared" in request.fixturenames:
        set_faults(request.getfixturevalue("shared"))


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def silent(cluster: Cluster, device: str, times: int = 1) -> None:
    set_faults(cluster, {"messages": "silent", "devices": [device], "count": times})


def reconcile(cluster: Cluster) -> dict[str, int]:
    answer = cluster.client.post("/reconcile")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# ------------------------------------------------------------------------------------------------------------- deadlines


def test_a_timeout_comes_after_its_time_and_grace_frees_the_device_once_and_a_late_success_still_counts(
    shared: Cluster, verify: Verify
) -> None:
    device = "dev-001"
    silent(shared, device)
    task = shared.create(device, timeout_seconds=1, retry=again(2, delay=120))
    follower = shared.create(device)
    shared.wait_status(task["id"], "send_success")
    late = shared.wait_status(task["id"], "failed_waiting_retry", timeout=20)
    shared.wait_status(follower["id"], "success", timeout=10)
    assert fired(shared) == [1]
    [execution] = shared.executions(task["id"])
    after_s = (at(execution["finished_at"]) - at(execution["sent_at"])).total_seconds()
    assert 2.0 <= after_s <= 12.0, "timeout_seconds + timeout_grace, acted on within 10 s"
    assert (late["error"]["code"], late["retry_count"], late["waiting_for"]["reason"]) == ("TIMEOUT", 0, "retry")
    assert (execution["status"], execution["outcome"], execution["push"]) == ("failed", "timeout", "sent")
    assert [row["kind"] for row in shared.history(task["id"])].count("RETRY") == 1
    shared.until(lambda: pushes(shared, task["id"]) and _asked_to_cancel(shared, execution["id"]), 10, "T4: a cancel")

    publish(
        shared,
        message(execution, "LOG", seq=1, content="at last"),
        message(execution, "SUCCESS", seq=2, exit_code=0, result={"rows": 7}),
    )
    done = shared.wait_status(task["id"], "success", timeout=10)
    assert (done["retry_count"], done["attempt"], done["error"], done["result"]) == (0, 1, None, {"rows": 7})
    [line] = lines(shared, task["id"])
    assert (line["content"], line["late"]) == ("at last", True)
    [execution] = shared.executions(task["id"])
    assert (execution["outcome"], execution["exit_code"]) == ("timeout", 0)
    assert moves(shared, task["id"]) == ["waiting", "running", "send_success", "failed_waiting_retry", "success"]
    assert len(pushes(shared, task["id"])) == 1
    assert sql(shared, "SELECT count(*) FROM queue_item WHERE task_id = ?", task["id"])[0][0] in (0, 1)
    reconcile(shared)
    assert sql(shared, "SELECT count(*) FROM queue_item WHERE task_id = ?", task["id"]) == [(0,)]
    verify(shared, [task["id"], follower["id"]])


def _asked_to_cancel(cluster: Cluster, execution_id: str) -> bool:
    return any(row["event"] == "cancel" and row["execution_id"] == execution_id for row in cluster.ledger())


def test_a_late_success_of_an_older_execution_does_not_touch_the_task(shared: Cluster, verify: Verify) -> None:
    device = "dev-002"
    silent(shared, device, times=2)
    task = shared.create(device, timeout_seconds=1, retry=again(1, delay=0.1))
    shared.wait_status(task["id"], "failed_waiting_retry", "running", timeout=20)

    def second_sent() -> dict[str, Any] | None:
        found = shared.task(task["id"])
        return found if (found["attempt"], found["status"]) == (2, "send_success") else None

    shared.until(second_sent, 10, "the retry to be sent")
    first, second = shared.executions(task["id"])
    publish(shared, message(first, "SUCCESS", seq=1, exit_code=0), message(first, "LOG", seq=2, content="late"))
    shared.until(lambda: lines(shared, task["id"]), 10, "the line of the first to be stored")
    now = shared.task(task["id"])
    assert (now["execution_id"], now["retry_count"]) == (second["id"], 1)
    assert now["status"] in ("send_success", "failed")  # its own deadline is near
    end = shared.wait_status(task["id"], "failed", timeout=20)
    assert end["error"]["code"] == "TIMEOUT"
    verify(shared, [task["id"]])


# ------------------------------------------------------------------------------------------------------------------ F62


@both_stacks
@pytest.mark.slow
def test_f62_results_around_their_deadline_have_one_winner_each(make_cluster: Make, verify: Verify) -> None:
    """Real processes: each result is published within 200 ms of the moment at which its deadline passes."""
    cluster = make_cluster(**{**FAST, "check_interval": 0.1}, timeout_grace=0).start(
        lab=("--simulate", "--duration", "0.05", "--devices", "40")
    )
    devices = [f"dev-{n:03d}" for n in range(1, 41)]
    set_faults(cluster, {"messages": "silent", "devices": devices, "count": 40})
    retry = again(1, delay=120)
    ids = cluster.create_many([cluster.body(device, timeout_seconds=3, retry=retry) for device in devices])
    cluster.wait_all(ids, "send_success", timeout=20)
    rows = {task_id: cluster.executions(task_id)[0] for task_id in ids}
    chance = random.Random(62)

    def report(task_id: str) -> None:
        row = rows[task_id]
        wait_s = (at(row["deadline_at"]) - datetime.now(UTC)).total_seconds() + chance.uniform(-0.15, 0.15)
        time.sleep(max(0.0, wait_s))  # not a wait for anything: the moment is the test
        publish(cluster, message(row, "LOG", seq=1, content="done"), message(row, "SUCCESS", seq=2, exit_code=0))

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(report, ids))
    cluster.wait_all(ids, "success", timeout=30)
    outcomes = []
    for task_id in ids:
        task, [row] = cluster.task(task_id), cluster.executions(task_id)
        kinds = [entry["kind"] for entry in cluster.history(task_id)]
        assert kinds.count("RETRY") == (
            1 if row["outcome"] == "timeout" and "failed_waiting_retry" in moves(cluster, task_id) else 0
        )
        assert (task["retry_count"], task["attempt"]) == (0, 1)
        assert [line["seq"] for line in lines(cluster, task_id)] == [1]
        outcomes.append(row["outcome"])
    assert set(outcomes) == {"success", "timeout"}, outcomes  # both have won some, or it was no race
    assert all(len(pushes(cluster, task_id)) == 1 for task_id in ids)
    verify(cluster, ids)


# ----------------------------------------------------------------------------------------------------------- foreign lock


def test_a_lock_of_somebody_else_is_device_busy_and_costs_a_retry(shared: Cluster, verify: Verify) -> None:
    device = "dev-011"
    sql(shared, "INSERT INTO device_lock (device_id, value) VALUES (?, 'maintenance by anna')", device)
    task = shared.create(device, retry=again(1))
    done = shared.wait_status(task["id"], "failed", timeout=20)
    assert (done["error"]["code"], done["retry_count"], done["attempt"]) == ("DEVICE_BUSY", 1, 0)
    assert "maintenance by anna" in done["error"]["message"]
    assert shared.executions(task["id"]) == []
    assert moves(shared, task["id"]) == ["waiting", "failed_waiting_retry", "failed"]
    assert pushes(shared, task["id"]) == []

    patient = shared.create(device, retry=again(3, delay=1))
    shared.wait_status(patient["id"], "failed_waiting_retry", timeout=10)
    reconcile(shared)
    assert lock_of(shared, device) == "maintenance by anna"  # what is not ours is left alone
    answer = shared.client.delete(f"/devices/{device}/lock", params={"reason": "anna is done"})
    assert answer.status_code == 200, answer.text
    done = shared.wait_status(patient["id"], "success", timeout=20)
    assert done["retry_count"] >= 1
    assert len(pushes(shared, patient["id"])) == 1
    verify(shared, [task["id"], patient["id"]])


# ----------------------------------------------------------------------------------------------------------- reconciling


def test_r1_a_left_over_lock_is_freed_but_not_one_of_a_moment_ago(shared: Cluster, verify: Verify) -> None:
    now_ms = int(time.time() * 1000)
    insert = "INSERT INTO device_lock (device_id, value, task_id, since_ms) VALUES (?, ?, ?, ?)"
    sql(shared, insert, "dev-021", new_id(), new_id(), now_ms - 31_000)
    sql(shared, insert, "dev-022", new_id(), new_id(), now_ms)
    old, young = shared.create("dev-021"), shared.create("dev-022")
    shared.until(lambda: (shared.task(young["id"])["waiting_for"] or {}).get("reason") == "device", 10, "it to wait")
    assert reconcile(shared)["locks_freed"] >= 1
    shared.wait_status(old["id"], "success", timeout=10)
    assert shared.task(young["id"])["status"] == "waiting"
    assert lock_of(shared, "dev-022") is not None
    sql(shared, "UPDATE device_lock SET since_ms = ? WHERE device_id = 'dev-022'", now_ms - 31_000)
    reconcile(shared)
    done = shared.wait_status(young["id"], "success", timeout=10)
    assert (done["retry_count"], done["attempt"]) == (0, 1)
    verify(shared, [old["id"], young["id"]])


def test_r2_a_lock_lost_under_an_open_execution_comes_back_and_nobody_else_gets_in(shared: Cluster, verify: Verify) -> None:
    device = "dev-023"
    silent(shared, device)
    task = shared.create(device, retry=ONCE)
    shared.wait_status(task["id"], "send_success")
    [execution] = shared.executions(task["id"])
    sql(shared, "DELETE FROM device_lock WHERE device_id = ?", device)
    follower = shared.create(device)
    assert shared.node is not None
    workers = shared.node.children("worker")
    before_s = sum(worker.cpu_times().user + worker.cpu_times().system for worker in workers)
    began = time.monotonic()
    # Whoever finds the device's open execution at W3 puts its lock back: it must not go round and round until R2 comes.
    shared.until(lambda: lock_of(shared, device) == execution["id"], 10, "the lock to be restored")
    shared.until(lambda: time.monotonic() - began > 2, 5, "two seconds to pass", every=0.1)
    spent_s = sum(worker.cpu_times().user + worker.cpu_times().system for worker in workers) - before_s
    assert spent_s < 1.0, f"workers spent {spent_s:.2f} s of CPU in 2 s over a device that is busy"
    assert reconcile(shared)["locks_restored"] == 0
    waiting = shared.task(follower["id"])
    assert (waiting["status"], waiting["retry_count"]) == ("waiting", 0)
    assert pushes(shared, follower["id"]) == []

    sql(shared, "DELETE FROM device_lock WHERE device_id = ?", device)
    assert reconcile(shared)["locks_restored"] <= 1
    assert lock_of(shared, device) == execution["id"]
    assert pushes(shared, follower["id"]) == []
    note_end(shared, execution)
    publish(shared, message(execution, "SUCCESS", seq=1, exit_code=0))
    shared.wait_status(task["id"], "success")
    shared.wait_status(follower["id"], "success", timeout=10)
    assert len(pushes(shared, follower["id"])) == 1
    verify(shared, [task["id"], follower["id"]])


def test_r5_queue_tables_emptied_under_load_lose_nothing(shared: Cluster, verify: Verify) -> None:
    ids = shared.create_many([shared.body(f"dev-{n % 60 + 41:03d}", retry=ONCE) for n in range(240)])
    for _ in range(3):
        done = len([entry for entry in shared.ledger() if entry["event"] == "accepted" and entry["task_id"] in ids])
        shared.until(lambda done=done: _taken(shared, ids) >= min(done + 30, 240), 20, "some to be pushed")
        sql(shared, "DELETE FROM queue_item")
        sql(shared, "DELETE FROM queue_lane")
    assert _taken(shared, ids) < 240, "the queue was empty already: nothing was lost"
    shared.wait_all(ids, "success", timeout=60)
    assert all(shared.task(task_id)["retry_count"] == 0 for task_id in ids[:30])
    taken = [entry["task_id"] for entry in shared.ledger() if entry["event"] == "accepted" and entry["task_id"] in ids]
    assert len(taken) == len(set(taken)) == 240
    verify(shared, ids, lines_per_execution=5)


def _taken(cluster: Cluster, ids: list[str]) -> int:
    wanted = set(ids)
    return sum(1 for entry in cluster.ledger() if entry["event"] == "accepted" and entry["task_id"] in wanted)


def test_b1_a_lock_service_that_lost_its_memory_is_rebuilt_before_it_grants_anything(
    shared: Cluster, verify: Verify
) -> None:
    ids = shared.create_many([shared.body(f"dev-{n % 50 + 101:03d}", retry=ONCE) for n in range(200)])
    for _ in range(2):
        before = _taken(shared, ids)
        shared.until(lambda before=before: _taken(shared, ids) >= min(before + 30, 200), 20, "some to be pushed")
        sql(shared, "DELETE FROM lock_epoch")
        sql(shared, "DELETE FROM device_lock")
        shared.until(lambda: sql(shared, "SELECT count(*) FROM lock_epoch") == [(1,)], 20, "the epoch to be set again")
    shared.wait_all(ids, "success", timeout=60)
    taken = [entry["task_id"] for entry in shared.ledger() if entry["event"] == "accepted" and entry["task_id"] in ids]
    assert len(taken) == len(set(taken)) == 200
    assert {shared.task(task_id)["retry_count"] for task_id in ids[::10]} == {0}
    verify(shared, ids, lines_per_execution=5)


# ---------------------------------------------------------------------------------------------------------------- cancel


def test_f07_canceling_a_hundred_tasks_while_they_go_out_gives_each_one_clear_end(shared: Cluster, verify: Verify) -> None:
    """Half of them right after their own create, half after a batch's, when some are out already."""

    def cancel(task_id: str) -> tuple[str, int]:
        return task_id, shared.client.post(f"/tasks/{task_id}/cancel", json={"reason": "changed my mind"}).status_code

    def create_and_cancel(n: int) -> tuple[str, int]:
        return cancel(shared.create(f"dev-{n + 61:03d}", retry=again(3))["id"])

    with ThreadPoolExecutor(8) as pool:
        answers = dict(pool.map(create_and_cancel, range(50)))
        batch = shared.create_many([shared.body(f"dev-{n + 61:03d}", retry=again(3)) for n in range(50, 100)])
        answers |= dict(pool.map(cancel, batch))
    ids = [*answers]
    shared.wait_all(ids, timeout=30)
    shared.until(lambda: sql(shared, "SELECT count(*) FROM mq_message") == [(0,)], 10, "the logs to be consumed")
    for task_id, answer in answers.items():
        status, times = shared.task(task_id)["status"], len(pushes(shared, task_id))
        assert (answer, status, times) in (
            (200, "canceled", 0), (202, "canceled", 1), (202, "success", 1), (409, "success", 1),
        ), task_id  # fmt: skip
        assert shared.task(task_id)["retry_count"] == 0
    assert {200, 202} <= set(answers.values()), "nothing was in between"
    verify(shared, ids)
