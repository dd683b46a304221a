"""What is measured: full lifecycles under load, latency at light load, lines stored, the cost of doing nothing."""

import os
import time
from collections import Counter
from datetime import datetime
from typing import Any

from rig import Rig, by_role, less, percentile

ROUND_TIMEOUT_S = 300.0
BATCH = 1000
SETTLE_S = 3.0  # after a load: acknowledgements, the last heartbeats


def load_round(rig: Rig, tasks: int, base: int, log_lines: int) -> dict[str, Any]:
    """`tasks` created in batches, until the API shows all of them final. `base`: results of earlier rounds."""
    bodies = rig.bodies(tasks)
    cpu, began = rig.cpu_s(), time.perf_counter()
    ids = rig.cluster.create_many(bodies)
    created_s = time.perf_counter() - began
    rig.wait_done(base + tasks, ROUND_TIMEOUT_S)
    took_s = time.perf_counter() - began
    rig.cluster.until(lambda: _acknowledged(rig), 30, "the stream to be empty", every=0.05)
    spent = less(rig.cpu_s(), cpu)
    client = spent.pop("client")
    verify(rig, ids, log_lines)
    return {
        "tasks": tasks,
        "seconds": round(took_s, 3),
        "tasks_per_s": round(tasks / took_s, 1),
        "created_per_s": round(tasks / created_s, 1),
        "log_lines_per_s": round(tasks * log_lines / took_s, 1),
        "cpu_ms_per_task": {name: round(value / tasks * 1000, 3) for name, value in by_role(spent).items()},
        "cpu_ms_per_task_all": round(sum(spent.values()) / tasks * 1000, 3),
        "cpu_ms_per_task_client": round(client / tasks * 1000, 3),
        "busy_cores": round(sum(spent.values()) / took_s, 2),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _acknowledged(rig: Rig) -> bool:
    nodes = rig.cluster.client.get("/nodes").json()["items"]
    return all(not node.get("consumer_lag") for node in nodes)


def verify(rig: Rig, ids: list[str], log_lines: int) -> None:
    """A number counts only if the work was right: all `success` at the first attempt, the ledger has one execution of each
    task, each execution id once, nothing refused or repeated; the lines of some are all there, once."""
    wrong: list[str] = []
    for i in range(0, len(ids), 100):
        answer = rig.cluster.client.get("/tasks", params={"ids": ",".join(ids[i : i + 100]), "limit": 100})
        rows = answer.json()["items"]
        wrong += [f"task {row['id']} is {row['status']}, attempt {row['attempt']}"
                  for row in rows if (row["status"], row["attempt"]) != ("success", 1)]  # fmt: skip
        if len(rows) != len(ids[i : i + 100]):
            wrong.append(f"{len(ids[i : i + 100]) - len(rows)} tasks are not there")
    mine = set(ids)
    ledger = [entry for entry in rig.cluster.ledger() if entry.get("task_id") in mine]
    per_task = Counter(entry["task_id"] for entry in ledger if entry["event"] == "accepted")
    per_execution = Counter(entry["execution_id"] for entry in ledger if entry["event"] == "accepted")
    wrong += [f"task {id} was pushed {per_task[id]} times" for id in ids if per_task[id] != 1]
    wrong += [f"execution {id} was accepted {n} times" for id, n in per_execution.items() if n != 1]
    wrong += [f"the ledger says {entry['event']}" for entry in ledger if entry["event"] in ("duplicate", "refused")]
    for id in ids[:: max(1, len(ids) // 10)]:
        total = rig.cluster.client.get(f"/tasks/{id}/logs", params={"limit": 1}).json()["total"]
        wrong += [f"task {id} has {total} lines"] if total != log_lines else []
    if wrong:
        raise SystemExit("\n".join(["the run does not count:", *wrong[:20]]))


def light_load(rig: Rig, per_second: float, seconds: float) -> dict[str, Any]:
    """Single creates at a steady pace, from the moment a create was due to be sent until the lab had taken the push. A
    create that goes out late, because the one before was slow, counts from when it was due."""
    count = int(per_second * seconds)
    bodies = rig.bodies(count)
    rig.cluster.create_many(rig.bodies(1))  # the script's verdict and the connections are there
    time.sleep(1)
    due_at: dict[str, float] = {}
    answered: list[float] = []
    start = time.time() + 0.1
    for n, body in enumerate(bodies):
        due = start + n / per_second
        time.sleep(max(0.0, due - time.time()))
        answer = rig.cluster.client.post("/tasks", json=body)
        answered.append((time.time() - due) * 1000)
        due_at[answer.json()["id"]] = due
    rig.cluster.wait_all(list(due_at))
    verify(rig, list(due_at), 5)
    accepted = {
        entry["task_id"]: datetime.fromisoformat(entry["at"]).timestamp()
        for entry in rig.cluster.ledger()
        if entry["event"] == "accepted" and entry["task_id"] in due_at
    }
    pushed = [(accepted[id] - due) * 1000 for id, due in due_at.items()]
    done = [_finished(row) - due_at[row["id"]] for row in _rows(rig, list(due_at))]
    return {
        "per_second": per_second,
        "creates": count,
        "create_to_pushed_ms": _spread(pushed),
        "create_to_answer_ms": _spread(answered),
        "create_to_success_ms": _spread([value * 1000 for value in done]),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _rows(rig: Rig, ids: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(0, len(ids), 100):
        found += rig.cluster.client.get("/tasks", params={"ids": ",".join(ids[i : i + 100]), "limit": 100}).json()["items"]
    return found


def _finished(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(row["finished_at"]).timestamp()


def _spread(values: list[float]) -> dict[str, float]:
    named = {
        "p50": percentile(values, 0.5),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }
    return {name: round(value, 2) for name, value in named.items()}


def idle(rig: Rig, seconds: float) -> dict[str, Any]:
    """Nothing to do: what everything costs then, in percent of one core, and how often it wakes up."""
    time.sleep(SETTLE_S)
    cpu, woken, began = rig.cpu_s(), rig.wake_ups(), time.perf_counter()
    time.sleep(seconds)
    took_s = time.perf_counter() - began
    spent, wakes = less(rig.cpu_s(), cpu), less(rig.wake_ups(), woken)
    spent.pop("client")
    wakes.pop("client")
    return {
        "seconds": round(took_s, 1),
        "percent_of_a_core": round(sum(spent.values()) / took_s * 100, 2),
        "percent_by_process": {name: round(value / took_s * 100, 2) for name, value in spent.items()},
        "wake_ups_per_s": {name: round(value / took_s, 1) for name, value in wakes.items()},
    }


def many_lines(rig: Rig, tasks: int, lines: int) -> dict[str, Any]:
    """Scripts that say a lot: lines per second through delivery, stream and one consumer into the store."""
    cpu, began = rig.cpu_s(), time.perf_counter()
    ids = rig.cluster.create_many(rig.bodies(tasks))
    rig.wait_done(tasks, ROUND_TIMEOUT_S)
    took_s = time.perf_counter() - began
    spent = less(rig.cpu_s(), cpu)
    verify(rig, ids, lines)
    total = tasks * lines
    return {
        "lines": total,
        "seconds": round(took_s, 3),
        "lines_per_s": round(total / took_s, 1),
        "cpu_us_per_line": {name: round(value / total * 1e6, 1) for name, value in by_role(spent).items()},
    }
