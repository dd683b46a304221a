"""Central control misbehaves: unclear pushes, silence, idle closes, storms of errors, cancellations (F29, F31 to F38)."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from scriptdispatch.central.client import CentralControl, PushFailed, PushRequest
from scriptdispatch.clock import SystemClock
from scriptdispatch.ids import new_id
from scriptdispatch.settings import Settings
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
    publish,
    pushes,
    set_faults,
)
from tests.system.harness import Cluster, free_port

pytestmark = pytest.mark.system
Make = Callable[..., Cluster]
Verify = Callable[..., None]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with installed(tmp_path_factory.mktemp("central"), timeout_grace=1, rate_limit_per_second=0) as cluster:
        yield cluster.start(lab=("--simulate", "--duration", "0.5", "--devices", "400"))


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    """The lab's switches of one test are not those of the next."""
    yield
    if "shared" in request.fixturenames:
        set_faults(request.getfixturevalue("shared"))


# ------------------------------------------------------------------------------------------------------------------ F29


def test_f29_a_success_after_a_forced_release_is_stored_flagged_and_changes_nothing(shared: Cluster, verify: Verify) -> None:
    device = "dev-001"
    set_faults(shared, {"messages": "silent", "devices": [device], "count": 1})
    first = shared.create(device, retry=again(3))
    second = shared.create(device)
    shared.wait_status(first["id"], "send_success")
    [execution] = shared.executions(first["id"])
    assert lock_of(shared, device) == execution["id"]

    answer = shared.client.delete(f"/devices/{device}/lock", params={"reason": "pulled the plug"})
    assert answer.status_code == 200, answer.text
    task = shared.task(first["id"])
    assert (task["status"], task["error"]["code"], task["retry_count"]) == ("failed", "LOCK_RELEASED", 0)
    [row] = [row for row in shared.history(first["id"]) if row["to"] == "failed"]
    assert "pulled the plug" in row["reason"]

    shared.wait_status(second["id"], "success")
    [next_one] = shared.executions(second["id"])
    assert next_one["fencing_token"] > execution["fencing_token"]

    before = shared.history(first["id"])
    publish(shared, message(execution, "LOG", seq=1, content="late line"), message(execution, "SUCCESS", seq=2, exit_code=0))
    noted = shared.until(lambda: len(shared.history(first["id"])) > len(before), 15, "the late success to be noted")
    assert noted
    [late] = lines(shared, first["id"])
    assert (late["content"], late["late"]) == ("late line", True)
    after = shared.task(first["id"])
    assert (after["status"], after["error"]["code"]) == ("failed", "LOCK_RELEASED")
    assert moves(shared, first["id"]) == ["waiting", "running", "send_success", "failed"]
    assert len(pushes(shared, first["id"])) == 1
    verify(shared, [first["id"], second["id"]])


# ------------------------------------------------------------------------------------------------------------------ F31


@pytest.mark.parametrize(("mode", "device"), [("close", "dev-011"), ("reset", "dev-012"), ("half_header", "dev-013")])
def test_f31_a_push_taken_without_a_reply_is_not_repeated_and_its_log_ends_it(
    shared: Cluster, verify: Verify, mode: str, device: str
) -> None:
    set_faults(shared, {"mode": mode, "devices": [device], "count": 1})
    task = shared.create(device, retry=again(3))
    unclear = shared.wait_status(task["id"], "send_success")
    assert unclear["push"] == "unknown"
    assert lock_of(shared, device) == unclear["execution_id"]
    assert fired(shared) == [1]
    done = shared.wait_status(task["id"], "success")
    assert (done["retry_count"], done["attempt"], done["error"]) == (0, 1, None)
    assert moves(shared, task["id"]) == ["waiting", "running", "send_success", "success"]
    assert len(pushes(shared, task["id"])) == 1
    shared.until(lambda: lock_of(shared, device) is None, 5, "the lock to be free")
    verify(shared, [task["id"]], lines_per_execution=5)


HANGS, SLOW, BLACK, SILENT = "dev-021", "dev-022", [f"dev-{n}" for n in range(301, 351)], ["dev-031", "dev-032", "dev-033"]


@pytest.mark.slow
def test_f31_f33_silence_costs_only_its_own_devices_and_ends_at_the_deadline(shared: Cluster, verify: Verify) -> None:
    """Everything that needs the 20 s of a request and the 25 s of a push at the same time: an answer after 29 s, one byte a
    second, no answer at all on fifty devices, and three unclear pushes of which nothing is heard again."""
    healthy = [shared.body(f"dev-{n:03d}", f"echo {n}", retry=ONCE) for n in range(101, 141) for _ in range(3)]
    alone_s, all_ids = _timed(shared, healthy)
    set_faults(
        shared,
        {"mode": "hang_after_accept", "seconds": 29, "devices": [HANGS], "count": 1},
        {"mode": "slow", "devices": [SLOW], "count": 1},
        {"mode": "blackhole", "devices": BLACK, "count": len(BLACK)},
        {"mode": "close", "devices": SILENT[:1], "count": 1},
        {"mode": "reset", "devices": SILENT[1:2], "count": 1},
        {"mode": "half_header", "devices": SILENT[2:], "count": 1},
        {"messages": "silent", "devices": [SLOW, *SILENT], "count": 4},
    )
    began = time.monotonic()
    hang = shared.create(HANGS, retry=again(3))
    behind_hang = shared.create(HANGS, retry=ONCE)
    slow = shared.create(SLOW, timeout_seconds=1, retry=ONCE)
    black = shared.create_many([shared.body(device, timeout_seconds=1, retry=ONCE) for device in BLACK])
    silent = [shared.create(device, timeout_seconds=1, retry=again(1)) for device in SILENT]
    behind = [shared.create(device, retry=ONCE) for device in SILENT]

    # F33: the others keep their rate while 52 requests hang.
    beside_s, ids = _timed(shared, healthy)
    all_ids += ids
    assert fired(shared) == [1, 1, 50, 1, 1, 1, 4]
    assert time.monotonic() - began < 19, "the machine was too slow for this to mean anything"
    assert alone_s / beside_s >= 0.9, f"{alone_s:.2f} s alone, {beside_s:.2f} s beside"

    # F31, answer after 29 s: the result overtakes the worker and frees the device long before.
    done = shared.wait_status(hang["id"], "success", timeout=5)
    assert (done["attempt"], moves(shared, hang["id"])) == (1, ["waiting", "running", "success"])
    shared.until(lambda: lock_of(shared, HANGS) is None, 5, "the lock to be free")
    assert time.monotonic() - began < 20, "it must not have waited for the request"
    # The next one of the device goes when its worker lets go of the item, which is after those 20 s at the latest.
    shared.wait_status(behind_hang["id"], "success", timeout=40)

    # F33: the time limit of a request holds for both.
    for task_id in (slow["id"], *black[:3]):
        unclear = shared.wait_status(task_id, "send_success", "failed", timeout=40)
        assert unclear["push"] == "unknown"
        [execution] = shared.executions(task_id)
        assert 19_000 <= execution["push_ms"] <= 26_000, execution["push_ms"]

    # F31: the deadline of an unclear push, not before 25 s. The lock is freed once, the retry and the next one flow.
    for task, follower in zip(silent, behind, strict=True):
        shared.wait_status(task["id"], "success", timeout=60)
        shared.wait_status(follower["id"], "success", timeout=20)
        first, second = shared.executions(task["id"])
        assert (first["error"]["code"], first["push"], first["outcome"]) == ("TIMEOUT", "unknown", "timeout")
        assert _seconds(first["created_at"], first["finished_at"]) >= 25
        assert second["status"] == "success"
        assert [row["kind"] for row in shared.history(task["id"]) if row["kind"] == "RETRY"] == ["RETRY"]
        assert shared.task(task["id"])["retry_count"] == 1
        assert len(pushes(shared, task["id"])) == 2  # the lost one, and its retry
    shared.wait_all([slow["id"], *black], "failed", timeout=60)
    for task_id in (slow["id"], *black[:3]):
        assert shared.task(task_id)["error"]["code"] == "TIMEOUT"
    made = [hang, behind_hang, slow, *silent, *behind]
    verify(shared, [*all_ids, *black, *(task["id"] for task in made)])
    assert moves(shared, hang["id"]) == ["waiting", "running", "success"]  # W7 came 20 s late and left it alone


def _timed(cluster: Cluster, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
    """How long these tasks take: three after the other on each of forty devices that need half a second each."""
    began = time.monotonic()
    ids = cluster.create_many(bodies)
    cluster.wait_all(ids, "success", timeout=30)
    return time.monotonic() - began, ids


def _seconds(begun: str, ended: str) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


# ------------------------------------------------------------------------------------------------------------------ F32


def test_f32_connections_closed_just_as_a_push_starts_cause_no_failure(shared: Cluster, verify: Verify) -> None:
    set_faults(shared, {"mode": "idle_close", "after_s": 0.1})
    ids: list[str] = []
    chance = random.Random(32)
    for _ in range(40):
        ids += [shared.create(f"dev-{n:03d}", retry=ONCE)["id"] for n in chance.sample(range(41, 100), 3)]
        time.sleep(chance.uniform(0.05, 0.15))  # not a wait for anything: pushes are to fall around the 100 ms of the close
    shared.wait_all(ids, timeout=60)
    tasks = [shared.task(task_id) for task_id in ids]
    assert {(task["status"], task["retry_count"]) for task in tasks} == {("success", 0)}
    taken = [entry["task_id"] for entry in shared.ledger() if entry["event"] == "accepted"]
    assert all(taken.count(task_id) == 1 for task_id in ids)
    assert fired(shared)[0] >= len(ids)
    verify(shared, ids, lines_per_execution=5)


# ------------------------------------------------------------------------------------------------------------------ F34


@pytest.mark.slow
def test_f34_a_storm_of_errors_causes_no_storm_of_pushes(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster(**FAST, central_5xx_means_refused=True).start(
        lab=("--simulate", "--duration", "0.05", "--devices", "60")
    )
    groups = {status: [f"dev-{10 * i + n:03d}" for n in range(1, 11)] for i, status in enumerate((500, 502, 503, 429))}
    set_faults(
        cluster,
        {"mode": "status", "status": 500, "devices": groups[500]},
        {"mode": "status", "status": 502, "devices": groups[502]},
        {"mode": "status", "status": 503, "devices": groups[503], "retry_after": 3},
        {"mode": "status", "status": 429, "devices": groups[429], "retry_after": 4},
    )
    began = time.monotonic()
    retry = {"strategy": "exponential", "max_retries": 8, "delay_seconds": 1, "backoff_rate": 2}
    ids = cluster.create_many([cluster.body(device, retry=retry) for group in groups.values() for device in group])
    waits = cluster.until(lambda: _asked_to_wait(cluster, ids[30]), 10, "a task to say that central control asked to wait")
    assert waits["until"] is not None

    def stormy() -> bool:
        counts = fired(cluster)
        # 1 + 2 + 4 s (and jitter) after the first: four tries a device by 9 s at most; Retry-After: one each 3 s and 4 s.
        elapsed = time.monotonic() - began
        assert counts[0] <= 40, counts
        assert counts[1] <= 40, counts
        assert counts[2] <= 10 * (1 + elapsed / 3), (counts, elapsed)
        assert counts[3] <= 10 * (1 + elapsed / 4), (counts, elapsed)
        return elapsed > 10

    cluster.until(stormy, 20, "the storm to be over", every=0.2)
    assert all(count >= 20 for count in fired(cluster)), fired(cluster)  # and they did try
    set_faults(cluster)
    cluster.wait_all(ids, "success", timeout=60)
    for task_id in ids[20:]:  # asked to wait: at no cost
        task = cluster.task(task_id)
        assert task["retry_count"] == 0
        assert all(row["push"] == "not_sent" for row in cluster.executions(task_id)[:-1])
    for task_id in ids[:20]:  # certainly failed there: each costs one
        task, rows = cluster.task(task_id), cluster.executions(task_id)
        assert task["retry_count"] == len(rows) - 1 >= 2
    gaps = [_gaps(cluster, task_id) for task_id in ids[:20]]
    assert len({round(gap[0], 2) for gap in gaps}) > 5, "the first retries came all at once: no jitter"
    assert all(1.0 <= gap[0] < 2.5 for gap in gaps), gaps
    verify(cluster, ids)


def _asked_to_wait(cluster: Cluster, task_id: str) -> dict[str, Any] | None:
    waits = cluster.task(task_id)["waiting_for"]
    return dict(waits) if waits and waits["reason"] == "central" else None


def _gaps(cluster: Cluster, task_id: str) -> list[float]:
    rows = cluster.executions(task_id)
    return [_seconds(earlier["finished_at"], later["created_at"]) for earlier, later in pairwise(rows)]


@pytest.mark.slow
def test_f34_the_breaker_opens_costs_nothing_and_closes_again(make_cluster: Make, verify: Verify) -> None:
    cluster = make_cluster(**FAST, device_cache_seconds=600).start(
        lab=("--simulate", "--duration", "0.05", "--devices", "60")
    )

    def breaker() -> str:
        [node] = [row for row in cluster.client.get("/nodes").json()["items"] if row["status"] == "alive"]
        return str(node["breaker"])

    # Its token is not accepted: at once.
    set_faults(cluster, {"mode": "status", "status": 401, "path": "all"})
    first = cluster.create(None, retry=ONCE)
    cluster.until(lambda: breaker() == "open", 10, "the breaker to open")
    rest = cluster.create_many([cluster.body(None, retry=ONCE) for _ in range(100)])
    waits = cluster.until(lambda: _asked_to_wait(cluster, rest[50]), 10, "a task to say that it waits for central control")
    assert waits["message"]
    set_faults(cluster, {"mode": "status", "status": 401, "path": "all"})  # counts from 0
    opened = time.monotonic()
    cluster.until(lambda: time.monotonic() - opened > 6, 10, "a probe's time to pass", every=0.2)
    assert fired(cluster)[0] <= 4, "while it is open only a probe each 5 s goes out"
    set_faults(cluster)
    cluster.until(lambda: breaker() == "closed", 20, "the breaker to close")
    ids = [first["id"], *rest]
    cluster.wait_all(ids, "success", timeout=30)
    assert {cluster.task(task_id)["retry_count"] for task_id in ids[:20]} == {0}

    # It cannot be reached: after five connect failures.
    assert cluster.lab is not None
    cluster.lab.kill()
    gone = cluster.create_many([cluster.body(None, retry=again(3, delay=0.5)) for _ in range(60)])
    cluster.until(lambda: breaker() == "open", 15, "the breaker to open")
    cluster.start_lab("--simulate", "--duration", "0.05", "--devices", "60")
    cluster.wait_all(gone, "success", timeout=60)
    assert breaker() == "closed"
    spent = sum(cluster.task(task_id)["retry_count"] for task_id in gone)
    assert spent <= 20, f"{spent} retries were charged for an outage"
    verify(cluster, ids + gone)


# ------------------------------------------------------------------------------------------------------------------ F38


async def test_f38_after_two_thousand_cancelled_pushes_the_pool_is_whole(make_cluster: Make) -> None:
    cluster = make_cluster()
    cluster.start_lab("--simulate", "--duration", "0", "--devices", "10")
    set_faults(cluster, {"mode": "hang_after_accept", "seconds": 0.05, "devices": ["dev-001"]})
    settings = Settings(store_url="memory://", central_url=cluster.lab_url)
    central = CentralControl(settings, SystemClock(), limit=64)
    chance = random.Random(38)
    cancelled = 0
    while cancelled < 2000:
        tasks = [asyncio.create_task(_push(central, "dev-001")) for _ in range(200)]
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)  # turns of the loop: cancelled in all kinds of moments
        if chance.random() < 0.7:
            await asyncio.sleep(chance.uniform(0, 0.08))
        for task in tasks:
            task.cancel()
        cancelled += sum(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
    pool = central._pushes
    assert pool is not None
    assert pool.in_use == 0
    answers = await asyncio.wait_for(asyncio.gather(*(_push(central, None) for _ in range(500))), 30)
    assert {answer.outcome for answer in answers} == {"taken"}
    assert pool.in_use == 0
    held = [await central.checkout() for _ in range(64)]  # every place is there
    assert pool.in_use == 64
    for connection in held:
        connection.release()
    await central.close()
    taken = [entry["execution_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    assert len(set(taken)) == len(taken)


async def _push(central: CentralControl, device_id: str | None) -> Any:
    connection = await central.checkout()
    request = PushRequest(
        execution_id=new_id(), task_id=new_id(), device_id=device_id, language="shell", script="",
        sha256="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", params=None, timeout_seconds=10,
        attempt=1, fencing_token=None,
    )  # fmt: skip
    return await central.push(connection, request)


async def test_f38_no_connection_at_all_is_said_and_costs_no_place() -> None:
    settings = Settings(store_url="memory://", central_url=f"http://127.0.0.1:{free_port()}")
    central = CentralControl(settings, SystemClock(), limit=4)
    for _ in range(20):
        with pytest.raises(PushFailed) as failed:
            await central.checkout()
        assert failed.value.answer.connect_failed
    assert central._pushes is not None
    assert central._pushes.in_use == 0
    await central.close()


@both_stacks
@pytest.mark.slow
def test_f38_a_node_ended_in_the_middle_of_its_pushes_loses_none_and_repeats_none(
    make_cluster: Make, verify: Verify
) -> None:
    cluster = make_cluster(**FAST, shutdown_grace=15).start(lab=("--simulate", "--duration", "0.05", "--devices", "300"))
    set_faults(cluster, {"mode": "hang_after_accept", "seconds": 1, "path": "scripts"})
    ids = cluster.create_many([cluster.body(f"dev-{n % 300 + 1:03d}", retry=ONCE) for n in range(450)])
    cluster.until(lambda: fired(cluster)[0] >= 100, 20, "pushes to be in flight", every=0.02)
    assert cluster.node is not None
    node, children = cluster.node, cluster.node.children()
    node.signal(signal.SIGTERM)
    assert node.wait(40) == 0
    assert not [child for child in children if child.is_running()]
    set_faults(cluster)
    cluster.start_node()
    cluster.wait_all(ids, "success", timeout=90)
    taken = [entry["execution_id"] for entry in cluster.ledger() if entry["event"] == "accepted"]
    assert len(taken) == len(set(taken)) == len(ids)
    verify(cluster, ids, lines_per_execution=5)
