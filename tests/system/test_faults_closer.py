"""Execution logs in every bad order and shape, and consumers that die between any two steps (F39 to F48)."""

import hashlib
import hmac
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

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
    publish,
    pushes,
    set_faults,
    sql,
)  # fmt: skip
from tests.system.harness import Cluster, pages

pytestmark = pytest.mark.system
Make = Callable[..., Cluster]
Verify = Callable[..., None]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Lab and web; each test has the node that it needs."""
    with installed(tmp_path_factory.mktemp("closer")) as cluster:
        cluster.start_lab("--simulate", "--duration", "0.05", "--devices", "60")
        cluster.start_web()
        yield cluster


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stage" in request.fixturenames:
        set_faults(request.getfixturevalue("stage"))


@pytest.fixture
def running(stage: Cluster) -> Cluster:
    """The stage with a healthy node, shared by the tests that need no other."""
    if stage.node is None or not stage.node.alive():
        stage.start_node()
    return stage


def new_node(cluster: Cluster, crash: str) -> None:
    if cluster.node is not None and cluster.node.alive():
        cluster.node.signal(signal.SIGTERM)
        assert cluster.node.wait(40) == 0
    cluster.start_node(crash=crash)


def stopped_at(cluster: Cluster, place: str) -> int | None:
    """The process that stopped itself there."""
    mark = cluster.crash_folder / f"fired.{place}"
    pid = int(mark.read_text().split()[0]) if mark.exists() and mark.read_text() else None
    return pid if pid and psutil.Process(pid).status() == psutil.STATUS_STOPPED else None


def silent_execution(cluster: Cluster, device: str, **body: Any) -> tuple[str, dict[str, Any]]:
    """A task that is sent, and of which the lab will say nothing: the test speaks for it."""
    set_faults(cluster, {"messages": "silent", "devices": [device], "count": 1})
    task = cluster.create(device, **body)
    cluster.wait_status(task["id"], "send_success")
    [execution] = cluster.executions(task["id"])
    assert fired(cluster) == [1]
    return task["id"], execution


def quarantine(cluster: Cluster) -> list[dict[str, Any]]:
    return list(pages(cluster.client, "/quarantine", limit=500))


def stream_is_empty(cluster: Cluster) -> bool:
    return sql(cluster, "SELECT count(*) FROM mq_message")[0][0] == 0


# ------------------------------------------------------------------------------------------------------------- F39, F40

STEPS = [
    ("f39_after_the_lines_are_stored", "closer.after_C1"),
    ("f40_after_the_row_is_closed", "closer.after_C2"),
    ("f40_after_the_task_followed_before_the_lock_is_free", "closer.after_K2"),
    ("f40_after_the_lock_is_free_before_the_ack", "closer.after_C4"),
    ("f40_right_after_the_ack", "closer.after_C5"),
]


@pytest.mark.parametrize(("place", "device"), [
    pytest.param(place, f"dev-{n + 1:03d}", id=name) for n, (name, place) in enumerate(STEPS)
])  # fmt: skip
def test_a_consumer_killed_between_its_steps_replays_to_the_same_end(
    stage: Cluster, verify: Verify, place: str, device: str
) -> None:
    if stage.node is not None:
        stage.node.signal(signal.SIGTERM)
        assert stage.node.wait(40) == 0
    task, follower = stage.create(device, retry=again(3)), stage.create(device)
    new_node(stage, f"{place}=stop#{task['id']}")
    pid = stage.until(lambda: stopped_at(stage, place), 20, "the consumer to be stopped")
    # I8: what is not done yet is not acknowledged; what is acknowledged is done.
    unacked = "SELECT count(*) FROM mq_message WHERE instr(CAST(body AS TEXT), ?)"
    assert (sql(stage, unacked, task["id"])[0][0] > 0) is (place != "closer.after_C5")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    done = stage.wait_status(task["id"], "success", timeout=60)
    stage.wait_status(follower["id"], "success", timeout=60)
    assert time.monotonic() - began < 25, "by redelivery: sooner than the reconciler would come"
    assert (done["retry_count"], done["attempt"], done["push"]) == (0, 1, "sent")
    assert moves(stage, task["id"]) in (["waiting", "running", "send_success", "success"], ["waiting", "running", "success"])
    assert [line["seq"] for line in sorted(lines(stage, task["id"]), key=lambda line: line["seq"])] == [1, 2, 3, 4, 5]
    assert len(pushes(stage, task["id"])) == 1
    stage.until(lambda: stream_is_empty(stage), 40, "every message to be acknowledged")
    stage.until(lambda: lock_of(stage, device) is None, 10, "the lock to be free")
    assert quarantine(stage) == []
    assert stage.node is not None
    assert stage.node.alive()
    verify(stage, [task["id"], follower["id"]], lines_per_execution=5)


@pytest.mark.slow
def test_f40_a_consumer_killed_four_times_over_one_task_still_ends_it_once(make_cluster: Make, verify: Verify) -> None:
    places = ["closer.after_receive", "closer.after_C2", "closer.after_K3", "closer.after_C5"]  # more: the pauses get long
    cluster = make_cluster(**FAST).start(crash=",".join(f"{place}=kill" for place in places))
    task = cluster.create("dev-001", retry=again(3))
    done = cluster.wait_status(task["id"], "success", timeout=60)
    cluster.until(lambda: all(cluster.fired(place) for place in places), 60, "all of them to have fired")
    follower = cluster.create("dev-001")
    cluster.wait_status(follower["id"], "success", timeout=60)
    assert (done["retry_count"], done["attempt"]) == (0, 1)
    assert moves(cluster, task["id"])[-1] == "success"
    assert moves(cluster, task["id"]).count("success") == 1
    cluster.until(lambda: stream_is_empty(cluster), 40, "every message to be acknowledged")
    verify(cluster, [task["id"], follower["id"]], lines_per_execution=5)


def test_f40_a_bug_that_ends_the_consumers_loop_ends_its_process_which_is_replaced(stage: Cluster, verify: Verify) -> None:
    new_node(stage, "consumer.before_receive=raise@2")
    first = stage.create("dev-007")
    stage.until(lambda: stage.fired("consumer.before_receive"), 20, "the bug")
    second = stage.create("dev-007")
    stage.wait_all([first["id"], second["id"]], "success", timeout=20)
    verify(stage, [first["id"], second["id"]], lines_per_execution=5)


# ------------------------------------------------------------------------------------------------------------------ F42


def test_f42_a_result_before_the_worker_stored_send_success_wins(stage: Cluster, verify: Verify) -> None:
    place, device = "worker.after_W6", "dev-008"
    if stage.node is not None:
        stage.node.signal(signal.SIGTERM)
        assert stage.node.wait(40) == 0
    task = stage.create(device, retry=again(3))
    new_node(stage, f"{place}=delay:2000#{task['id']}")
    done = stage.wait_status(task["id"], "success", timeout=20)
    assert stage.fired(place)
    assert (done["retry_count"], done["attempt"], done["push"], done["progress"]) == (0, 1, "sent", 100)
    follower = stage.create(device)
    stage.wait_status(follower["id"], "success", timeout=20)  # after the worker has come back and lost its W7
    assert moves(stage, task["id"]) == ["waiting", "running", "success"]
    assert stage.task(task["id"])["status"] == "success"
    [execution] = stage.executions(task["id"])
    assert (execution["status"], execution["push"]) == ("success", "sent")
    verify(stage, [task["id"], follower["id"]], lines_per_execution=5)


def test_f42_the_terminal_message_first_and_its_lines_after_it(running: Cluster, verify: Verify) -> None:
    device = "dev-009"
    set_faults(running, {"messages": "terminal_first", "devices": [device]})
    task = running.create(device)
    running.wait_status(task["id"], "success")
    running.until(lambda: len(lines(running, task["id"])) == 5, 10, "the lines after the end to be stored")
    assert fired(running) == [1]
    # In another batch, so that the row is closed when they come: stored, flagged, and nothing moves.
    [execution] = running.executions(task["id"])
    publish(running, message(execution, "LOG", seq=50, content="afterthought"))
    running.until(lambda: len(lines(running, task["id"])) == 6, 10, "the afterthought to be stored")
    [late] = [line for line in lines(running, task["id"]) if line["seq"] == 50]
    assert late["late"] is True
    assert moves(running, task["id"])[-1] == "success"
    verify(running, [task["id"]])


@pytest.mark.parametrize(
    ("first", "status", "device"), [("SUCCESS", "success", "dev-010"), ("FAILURE", "failed", "dev-011")]
)
def test_f42_of_two_contradictory_results_the_first_wins_and_the_other_is_noted(
    running: Cluster, verify: Verify, first: str, status: str, device: str
) -> None:
    task_id, execution = silent_execution(running, device, retry=ONCE)
    second = "FAILURE" if first == "SUCCESS" else "SUCCESS"
    results = [message(execution, kind, seq=n, exit_code=n - 1) for n, kind in enumerate((first, second), 1)]
    publish(running, *results)  # in one batch
    running.wait_status(task_id, status)
    publish(running, results[1])  # and again in another
    publish(running, results[0])
    running.until(lambda: stream_is_empty(running), 10, "the messages to be consumed")
    assert running.task(task_id)["status"] == status
    notes = [row for row in running.history(task_id) if row["kind"] == "INFO"]
    assert [second in row["reason"] for row in notes] == [True], notes
    assert moves(running, task_id) == ["waiting", "running", "send_success", status]
    assert running.executions(task_id)[0]["status"] == status
    verify(running, [task_id])


def test_f42_the_labs_contradiction_in_a_retried_task_leaves_its_state_alone(running: Cluster, verify: Verify) -> None:
    device = "dev-012"
    set_faults(running, {"messages": "contradict", "devices": [device], "count": 1})
    task = running.create(device, retry=again(3))
    running.wait_status(task["id"], "success")
    running.until(lambda: stream_is_empty(running), 10, "the messages to be consumed")
    assert fired(running) == [1]
    done = running.task(task["id"])
    assert (done["status"], done["retry_count"], done["attempt"]) == ("success", 0, 1)
    verify(running, [task["id"]])


# ------------------------------------------------------------------------------------------------------------------ F41


def test_f41_each_message_three_times_is_stored_once(running: Cluster, verify: Verify) -> None:
    devices = [f"dev-{n:03d}" for n in range(21, 31)]
    set_faults(running, {"messages": "triple", "devices": devices})
    batched = running.create_many([running.body(device) for device in devices])
    running.wait_all(batched, "success")
    assert fired(running) == [len(batched)]
    task_id, execution = silent_execution(running, "dev-031")
    said = [message(execution, "LOG", seq=n, content=f"line {n}") for n in range(1, 6)]
    for one in [*said, message(execution, "SUCCESS", seq=6, exit_code=0)]:
        for _ in range(3):
            publish(running, one)
    running.wait_status(task_id, "success")
    running.until(lambda: stream_is_empty(running), 10, "the messages to be consumed")
    assert moves(running, task_id) == ["waiting", "running", "send_success", "success"]
    assert not [row for row in running.history(task_id) if row["kind"] == "INFO"], "the same result again is nothing to note"
    assert [line["seq"] for line in lines(running, task_id)] == [1, 2, 3, 4, 5]
    verify(running, batched, lines_per_execution=5)
    verify(running, [task_id])


# ------------------------------------------------------------------------------------------------------------- F43, F44


def test_f43_poison_over_http_is_refused_by_index_and_its_neighbours_are_taken(running: Cluster, verify: Verify) -> None:
    before = len(quarantine(running))
    task_id, execution = silent_execution(running, "dev-032")
    bad: list[Any] = [
        None, 7, "text", [], {}, {"type": "LOG"}, message(execution, "NONSENSE"),
        {**message(execution, "LOG"), "task_id": 9}, {**message(execution, "LOG"), "device_id": ["x"]},
        message(execution, "LOG", seq=3, content="x" * 5_000_000),
    ]  # fmt: skip
    good = [message(execution, "LOG", seq=n, content=f"line {n}") for n in range(1, len(bad) + 1)]
    answer = publish(running, *[one for pair in zip(good, bad, strict=True) for one in pair])
    assert answer["accepted"] == len(good)
    assert [row["index"] for row in answer["rejected"]] == [2 * n + 1 for n in range(len(bad))]
    assert all(row["reason"] for row in answer["rejected"])
    publish(running, message(execution, "SUCCESS", seq=99))
    running.wait_status(task_id, "success")
    assert [line["seq"] for line in lines(running, task_id)] == list(range(1, len(bad) + 1))
    assert len(quarantine(running)) == before
    verify(running, [task_id])


def test_f43_the_labs_poison_between_good_messages_holds_up_nothing(running: Cluster, verify: Verify) -> None:
    device = "dev-033"
    set_faults(running, {"messages": "poison", "devices": [device], "count": 1})
    before = len(quarantine(running))
    task = running.create(device)
    running.wait_status(task["id"], "success")
    assert fired(running) == [1]
    running.until(lambda: stream_is_empty(running), 10, "the messages to be consumed")
    assert len(quarantine(running)) == before  # what cannot be used is seen by its shape, and answered in `rejected`
    contents = [line["content"] for line in lines(running, task["id"])]
    assert [text for text in contents if text.startswith("line ")] == [f"line {n} of 5" for n in range(1, 6)]
    assert "nul \x00 inside" in contents
    verify(running, [task["id"]])


def test_f43_poison_in_the_stream_is_quarantined_whole_and_stays_so_after_a_restart(
    running: Cluster, verify: Verify
) -> None:
    before = {row["id"] for row in quarantine(running)}
    task_id, execution = silent_execution(running, "dev-034")

    def encoded(**facts: Any) -> bytes:
        return json.dumps(message(execution, "LOG", **facts)).encode()

    poison = [
        b"", b"not json", b"\xff\xfe\x00 invalid", b"null", b"[]", b'{"type": "LOG"}', b"{" * 100_000,
        encoded(seq="seven"), encoded(seq=1.5), encoded(content={"no": "text"}), encoded(time="yesterday"),
        encoded(seq=2, content="a")[:-5], b'{"execution_id": "\xff"}', encoded(content="lone \ud800 half", seq=9),
        json.dumps(message(execution, "SUCCESS", exit_code="zero")).encode(),
    ]  # fmt: skip
    good = [
        encoded(seq=1, content="first"), encoded(seq=2, content="nul \x00 inside"), encoded(seq=3, content="x" * 5_000_000),
        encoded(seq=4, content="<b>${x} {0} %s</b> \u202e \U0001f600"),
    ]  # fmt: skip
    mixed = [*poison[:7], good[0], good[1], *poison[7:], good[2], good[3]]
    for body in mixed:
        sql(running, "INSERT INTO mq_message (key, body) VALUES (NULL, ?)", body)
    publish(running, message(execution, "SUCCESS", seq=5, exit_code=0))
    running.wait_status(task_id, "success")
    running.until(lambda: stream_is_empty(running), 20, "the messages to be consumed")

    held = {row["id"]: row for row in quarantine(running) if row["id"] not in before}
    assert len(held) == len(poison), [(row["reason"], row["body"][:60]) for row in held.values()]
    assert sorted(row["size"] for row in held.values()) == sorted(len(body) for body in poison)
    assert all(row["reason"] and row["detail"] for row in held.values())
    raw = {bytes(body) for (body,) in sql(running, "SELECT body FROM quarantine")}
    assert set(poison) <= raw
    stored = {line["seq"]: line for line in lines(running, task_id)}
    assert sorted(stored) == [1, 2, 3, 4]
    assert stored[2]["content"] == "nul \x00 inside"
    assert (len(stored[3]["content"]), stored[3]["truncated"]) == (64 * 1024, True)
    assert stored[4]["content"] == "<b>${x} {0} %s</b> \u202e \U0001f600"

    new_node(running, "")
    after = running.create("dev-038")
    running.wait_status(after["id"], "success")
    assert {row["id"] for row in quarantine(running)} == before | held.keys()
    verify(running, [task_id, after["id"]])


def test_f44_a_line_that_the_store_cannot_take_is_set_aside_alone(running: Cluster, verify: Verify) -> None:
    before = {row["id"] for row in quarantine(running)}
    task_id, execution = silent_execution(running, "dev-035")
    too_large = 2**63  # for a column of any of our stores
    good = [message(execution, "LOG", seq=n, content=f"line {n}") for n in range(1, 11)]
    bad = message(execution, "LOG", seq=too_large, content="one too many")
    again_ = message(execution, "LOG", seq=3, content="a duplicate")
    publish(running, *good[:5], bad, again_, *good[5:], message(execution, "SUCCESS", seq=11, exit_code=0))
    running.wait_status(task_id, "success")
    running.until(lambda: stream_is_empty(running), 20, "the messages to be consumed")
    stored = {line["seq"]: line["content"] for line in lines(running, task_id)}
    assert stored == {n: f"line {n}" for n in range(1, 11)}
    [held] = [row for row in quarantine(running) if row["id"] not in before]
    assert "one too many" in held["body"]
    verify(running, [task_id])


def test_f44_a_result_that_the_store_cannot_take_holds_up_nobody(running: Cluster, verify: Verify) -> None:
    before = {row["id"] for row in quarantine(running)}
    task_id, execution = silent_execution(running, "dev-036", retry=ONCE)
    other_id, other = silent_execution(running, "dev-037", retry=ONCE)
    publish(
        running,
        message(execution, "LOG", seq=1, content="before"),
        message(execution, "SUCCESS", seq=2, exit_code=2**70),
        message(execution, "LOG", seq=3, content="after"),
        message(other, "SUCCESS", seq=1, exit_code=0),
    )
    running.wait_status(other_id, "success")
    running.until(lambda: stream_is_empty(running), 20, "the messages to be consumed")
    assert running.task(task_id)["status"] == "send_success"
    assert [line["seq"] for line in lines(running, task_id)] == [1, 3]
    assert len([row for row in quarantine(running) if row["id"] not in before]) == 1
    publish(running, message(execution, "SUCCESS", seq=4, exit_code=0))
    running.wait_status(task_id, "success")
    verify(running, [task_id, other_id])


# ------------------------------------------------------------------------------------------------------------------ F48


def signed(body: dict[str, Any], secret: str) -> dict[str, Any]:
    """SPEC 6, written down again on purpose."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return {**body, "signature": hmac.new(secret.encode(), canonical, hashlib.sha256).hexdigest()}


def test_f48_messages_of_strangers_are_quarantined_counted_and_move_nothing(make_cluster: Make, verify: Verify) -> None:
    secret = "a-secret-of-the-stream"
    cluster = make_cluster(**FAST, mq_secret=secret).start(lab=("--simulate", "--duration", "0.05"))
    ids = []
    for n, mode in enumerate(("unknown_execution", "wrong_device", "forged"), 1):
        set_faults(cluster, {"messages": mode, "devices": [f"dev-{n:03d}"]})
        task = cluster.create(f"dev-{n:03d}")
        cluster.wait_status(task["id"], "success")
        assert fired(cluster) == [1]
        ids.append(task["id"])
    cluster.until(lambda: len(quarantine(cluster)) == 3, 10, "the three to be quarantined")
    assert sorted(row["reason"] for row in quarantine(cluster)) == ["bad_signature", "unknown_execution", "wrong_device"]

    task_id, execution = silent_execution(cluster, "dev-004")
    bad = signed(message(execution, "FAILURE", seq=1), "another secret")
    bent = {**signed(message(execution, "FAILURE", seq=1, retryable=True), secret), "retryable": False}
    publish(cluster, message(execution, "FAILURE", seq=1), bad, bent)
    publish(cluster, signed(message({**execution, "task_id": ids[0]}, "FAILURE", seq=1), secret))
    cluster.until(lambda: len(quarantine(cluster)) == 7, 10, "the four to be quarantined")
    assert sorted(row["reason"] for row in quarantine(cluster))[:4] == ["bad_signature"] * 4
    untouched = cluster.task(task_id)
    assert (untouched["status"], untouched["error"], untouched["retry_count"]) == ("send_success", None, 0)
    assert lines(cluster, task_id) == []
    publish(cluster, signed(message(execution, "SUCCESS", seq=2, exit_code=0), secret))
    cluster.wait_status(task_id, "success")
    verify(cluster, [*ids, task_id])

    def counted() -> bool:
        text = cluster.client.get(f"{cluster.url}/metrics").text
        return "scriptdispatch_quarantined_total 7.0" in text.splitlines()

    cluster.until(counted, 10, "the counter to show them")
