"""One task's whole way, with real processes and real scripts."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.system.conftest import both_stacks
from tests.system.harness import Cluster

pytestmark = [pytest.mark.system, both_stacks]
Make = Callable[..., Cluster]
Verify = Callable[..., None]
REAL = ("--devices", "10")


def test_a_script_runs_on_its_device_and_its_output_arrives(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start(lab=REAL)
    task = cluster.create(content="echo one\necho two >&2\necho ::progress 50 half way\necho drei")
    done = cluster.wait_status(task["id"], "success", "failed")
    assert done["status"] == "success", done
    assert done["progress"] == 100
    assert done["error"] is None
    lines = cluster.client.get(f"/tasks/{task['id']}/logs").json()
    assert sorted((line["stream"], line["content"]) for line in lines["items"]) == [
        ("stderr", "two"), ("stdout", "drei"), ("stdout", "one"),
    ]  # fmt: skip
    [execution] = cluster.executions(task["id"])
    assert execution["status"] == "success"
    assert execution["push"] == "sent"
    assert execution["exit_code"] == 0
    assert execution["fencing_token"] == 1
    assert [row["to"] for row in cluster.history(task["id"])] == ["waiting", "running", "send_success", "success"]
    verify(cluster, [task["id"]])


def test_fifty_tasks_on_ten_devices_run_one_at_a_time_in_order(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start()
    bodies = [cluster.body(f"dev-{i % 10 + 1:03d}", f"echo {i}") for i in range(50)]
    ids = cluster.create_many(bodies)
    cluster.wait_all(ids)
    tasks = [cluster.task(task_id) for task_id in ids]
    assert {task["status"] for task in tasks} == {"success"}
    pushed = [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    for device in range(10):
        mine = ids[device::10]
        assert [task_id for task_id in pushed if task_id in mine] == mine
    verify(cluster, ids, lines_per_execution=5)


def test_twenty_tasks_on_one_device_wait_in_its_lane_and_cost_no_retry(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start(lab=("--simulate", "--duration", "0.3"))
    ids = cluster.create_many([cluster.body("dev-001", f"echo {i}") for i in range(20)])
    cluster.wait_status(ids[0], "send_success")

    def told() -> dict[str, Any] | None:
        task = cluster.task(ids[10])
        reason = (task["waiting_for"] or {}).get("reason")
        return task["waiting_for"] if reason == "device" and task["waiting_for"]["task_id"] else None

    waits = cluster.until(told, 10, "the eleventh to say why it waits")
    assert 1 <= waits["position"] <= 10
    assert waits["task_id"] in ids
    assert "in the lane of dev-001" in waits["message"]
    cluster.wait_all(ids, timeout=40)
    tasks = [cluster.task(task_id) for task_id in ids]
    assert {(task["status"], task["retry_count"], task["attempt"]) for task in tasks} == {("success", 0, 1)}
    pushed = [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    assert pushed == ids
    verify(cluster, ids)


def test_a_task_for_later_starts_at_its_time(make_cluster: Make) -> None:
    cluster = make_cluster().start()
    due = datetime.now(UTC) + timedelta(seconds=4)
    task = cluster.create(run_at=due.isoformat())
    assert task["waiting_for"]["reason"] == "due_time"
    cluster.wait_status(task["id"], "success", timeout=15)
    [entry] = [entry for entry in cluster.ledger() if entry["event"] == "accepted"]
    late_s = (datetime.fromisoformat(entry["at"]) - due).total_seconds()
    assert 0 <= late_s < 0.5, late_s


def test_a_waiting_task_is_canceled_at_once_and_never_pushed(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start(lab=("--simulate", "--duration", "1"))
    first, second = cluster.create(), cluster.create()
    cluster.wait_status(first["id"], "send_success")
    answer = cluster.client.post(f"/tasks/{second['id']}/cancel", json={"reason": "wrong device"})
    assert answer.status_code == 200
    assert answer.json()["status"] == "canceled"
    cluster.wait_status(first["id"], "success")
    assert [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "accepted"] == [first["id"]]
    verify(cluster, [first["id"], second["id"]])


def test_a_sent_task_is_canceled_on_the_device(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start(lab=REAL)
    task = cluster.create(content="echo started\nsleep 60")
    cluster.wait_status(task["id"], "send_success")
    answer = cluster.client.post(f"/tasks/{task['id']}/cancel", json={"reason": "enough"})
    assert answer.status_code == 202
    assert answer.json()["cancel_requested"] is True
    began = time.monotonic()
    assert cluster.wait_status(task["id"], "canceled", timeout=15)["retry_count"] == 0
    assert time.monotonic() - began < 10
    verify(cluster, [task["id"]])


def test_a_failing_script_retries_and_then_fails(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster().start(lab=REAL)
    task = cluster.create(content="exit 3", retry={"max_retries": 2, "delay_seconds": 0.2})
    done = cluster.wait_status(task["id"], "failed", timeout=30)
    assert done["error"]["code"] == "EXECUTION_FAILED"
    assert done["retry_count"] == 2
    assert [row["exit_code"] for row in cluster.executions(task["id"])] == [3, 3, 3]
    verify(cluster, [task["id"]])
