"""The web process dies, clients repeat themselves, people cancel in the middle (F01, F04, F07)."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.system.crashkit import accepted, fresh_node, hit, kill_node, outcome, rows
from tests.system.faultkit import installed, lock_of, message, moves, publish, pushes, set_faults, sql
from tests.system.harness import Cluster

pytestmark = pytest.mark.system
Verify = Callable[..., None]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The lab; every test brings its web process and its node."""
    with installed(tmp_path_factory.mktemp("api"), timeout_grace=1, test_grace_s=2) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.2", "--devices", "100")
        yield cluster


@pytest.fixture(autouse=True)
def _quiet(shared: Cluster) -> Iterator[None]:
    yield
    kill_node(shared)
    set_faults(shared)


def stop_web(cluster: Cluster) -> None:
    if cluster.web is not None:
        cluster.web.kill()
        cluster.web = None


def need_web(cluster: Cluster) -> None:
    if cluster.web is None or not cluster.web.alive():
        cluster.start_web()


def fresh_web(cluster: Cluster, crash: str = "") -> None:
    stop_web(cluster)
    cluster.crash_folder = cluster.folder / f"crashes{len(cluster.processes)}"
    cluster.crash_folder.mkdir()
    cluster.start_web(crash=crash)


def stored(cluster: Cluster, device: str) -> list[str]:
    return [str(row[0]) for row in sql(cluster, "SELECT id FROM script_task WHERE device_id = ? ORDER BY id", device)]


# ------------------------------------------------------------------------------------------------------------------ F01


def test_f01_a_task_whose_web_process_died_before_the_queue_push_is_found_and_run(shared: Cluster, verify: Verify) -> None:
    need_web(shared)
    fresh_node(shared)
    fresh_web(shared, "web.after_insert=kill")
    web = shared.web
    assert web is not None
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


# ------------------------------------------------------------------------------------------------------------------ F04


def test_f04_a_repeated_create_gets_the_first_answer_again(shared: Cluster, verify: Verify) -> None:
    need_web(shared)
    fresh_node(shared)
    first, second = (_create(shared, "dev-002", "again") for _ in range(2))
    assert (first.status_code, second.status_code, second.content) == (201, 201, first.content)
    shared.wait_status(first.json()["id"], "success")
    third = _create(shared, "dev-002", "again")
    assert (third.status_code, third.content) == (201, first.content)
    assert stored(shared, "dev-002") == [first.json()["id"]]
    assert accepted(shared, [first.json()["id"]]) == {first.json()["id"]: 1}
    verify(shared, [first.json()["id"]])


def test_f04_creates_in_parallel_with_one_key_make_one_task(shared: Cluster, verify: Verify) -> None:
    fresh_web(shared, "web.after_insert=delay:700")
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(_create(shared, "dev-003", "both"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert shared.fired("web.after_insert")
    assert [answer.status_code for answer in answers] == [201] * 4
    assert len({answer.content for answer in answers}) == 1
    [task_id] = stored(shared, "dev-003")
    assert answers[0].json()["id"] == task_id
    fresh_node(shared)
    shared.wait_status(task_id, "success")
    assert outcome(shared, task_id) == ("success", 0, 1)
    verify(shared, [task_id])


@pytest.mark.parametrize("many", [False, True], ids=["one", "batch"])
def test_f04_a_create_repeated_after_its_web_process_died_finds_its_task(
    shared: Cluster, verify: Verify, many: bool
) -> None:
    device = "dev-005" if many else "dev-004"
    fresh_web(shared, "web.after_insert=kill")
    with pytest.raises(httpx.TransportError):
        _create(shared, device, f"died {many}", many)
    assert shared.fired("web.after_insert")
    before = stored(shared, device)
    assert len(before) == (3 if many else 1)
    shared.start_web()
    answer = _create(shared, device, f"died {many}", many)
    assert answer.status_code == (200 if many else 201), answer.text
    body = answer.json()
    ids = [item["task"]["id"] for item in body["items"]] if many else [body["id"]]
    assert (sorted(ids), stored(shared, device)) == (before, before)
    assert _create(shared, device, f"died {many}", many).content == answer.content
    fresh_node(shared)
    shared.wait_all(ids, "success")
    assert set(accepted(shared, ids).values()) == {1}
    verify(shared, ids)


def _create(cluster: Cluster, device: str, key: str, many: bool = False) -> httpx.Response:
    """With a client of its own, as a program that was started again has."""
    body: Any = {"tasks": [cluster.body(device)] * 3} if many else cluster.body(device)
    with httpx.Client(base_url=cluster.client.base_url, timeout=40) as client:
        return client.post("/tasks/batch" if many else "/tasks", json=body, headers={"Idempotency-Key": key})


# ------------------------------------------------------------------------------------------------------------------ F07


@pytest.mark.parametrize(
    "place", ["worker.after_W1", "worker.after_W2", "worker.after_W3", "worker.after_W4", "worker.before_W5"]
)
def test_f07_a_cancel_before_the_point_of_no_return_wins_and_nothing_is_pushed(
    shared: Cluster, verify: Verify, place: str
) -> None:
    need_web(shared)
    task, behind = shared.create("dev-010"), shared.create("dev-010")
    fresh_node(shared, f"{place}=delay:1500#{task['id']}", wait=False)
    hit(shared, place)
    answer = shared.client.post(f"/tasks/{task['id']}/cancel", json={"reason": "wrong device"})
    assert (answer.status_code, answer.json()["status"]) == (200, "canceled"), answer.text
    shared.wait_status(behind["id"], "success")
    assert outcome(shared, task["id"]) == ("canceled", 0, 0)
    assert {push for _, push in rows(shared, task["id"])} <= {"not_sent"}
    shared.until(lambda: lock_of(shared, "dev-010") is None, 10, "the device to be free")
    verify(shared, [task["id"], behind["id"]])


def test_f07_a_cancel_after_the_point_of_no_return_is_passed_on_and_there_is_one_push(
    shared: Cluster, verify: Verify
) -> None:
    """Central control does not have it yet when it is asked first: it is asked again."""
    need_web(shared)
    set_faults(shared, {"messages": "silent", "devices": ["dev-011"]})  # a script that takes its time
    task = shared.create("dev-011", retry={"max_retries": 3, "delay_seconds": 0.2})
    fresh_node(shared, f"worker.after_W5=delay:1500#{task['id']}", wait=False)
    hit(shared, "worker.after_W5")
    answer = shared.client.post(f"/tasks/{task['id']}/cancel", json={"reason": "too late"})
    assert (answer.status_code, answer.json()["cancel_requested"]) == (202, True), answer.text
    assert pushes(shared, task["id"]) == []
    shared.wait_status(task["id"], "send_success")
    [row] = shared.executions(task["id"])
    asked = {"event": "cancel", "execution_id": row["id"]}

    def told() -> list[bool]:
        return [entry["known"] for entry in shared.ledger() if asked.items() <= entry.items()]

    shared.until(lambda: told()[-1:] == [True], 15, "central control to be asked again")
    assert told()[0] is False
    publish(shared, message(row, "CANCELED", seq=1))
    shared.wait_status(task["id"], "canceled")
    assert outcome(shared, task["id"]) == ("canceled", 0, 1)
    assert len(rows(shared, task["id"])) == 1
    verify(shared, [task["id"]])
