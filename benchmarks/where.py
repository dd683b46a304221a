"""Makes a picture out of what the probes counted."""

from collections import Counter
from typing import Any

from measures import load_round
from rig import Rig

TOP_JOBS = 8
TOP_PLACES = 45


def where_it_goes(devices: int, tasks: int, role: str | None) -> dict[str, Any]:
    """One warm-up round, then one that counts, with the probe in all processes (and a sampler in those of `role`)."""
    with Rig(devices, looking=True) as rig:
        load_round(rig, tasks // 4, 0, 5)
        if role:
            rig.profile(role)
        rig.snapshot()
        row = load_round(rig, tasks, tasks // 4, 5)
        seen = rig.snapshot()
    return {
        "tasks": tasks,
        "tasks_per_s": row["tasks_per_s"],
        "transactions": {name: _transactions(facts, tasks) for name, facts in seen.items() if facts["transactions"]},
        "syncs_per_s": round(_sum(seen, "durable", 0) / row["seconds"]),
        "in_transactions": (_sum(seen, None, 3) + _sum(seen, None, 4)) / row["seconds"],
        "jobs": {name: _jobs(facts, tasks) for name, facts in seen.items() if facts["jobs"]},
        "profile": {name: _places(facts, tasks) for name, facts in seen.items() if facts["samples"]},
    }


def _sum(seen: dict[str, Any], kind: str | None, column: int) -> float:
    rows = [row for facts in seen.values() for name, row in facts["transactions"].items() if kind in (None, name)]
    return float(sum(row[column] for row in rows))


def _transactions(facts: dict[str, Any], tasks: int) -> dict[str, dict[str, float]]:
    found = {}
    for kind, (count, jobs, lock_s, work_s, commit_s) in facts["transactions"].items():
        whole_s = lock_s + work_s + commit_s
        found[kind] = {
            "per_task": round(count / tasks, 4),
            "jobs_each": round(jobs / count, 1),
            "lock_ms": round(lock_s / count * 1000, 3),
            "work_ms": round(work_s / count * 1000, 3),
            "commit_ms": round(commit_s / count * 1000, 3),
            "lock_share": lock_s / whole_s,
            "work_share": work_s / whole_s,
            "commit_share": commit_s / whole_s,
        }
    return found


def _jobs(facts: dict[str, Any], tasks: int) -> list[dict[str, Any]]:
    rows = [
        {
            "job": name,
            "per_task": round(count / tasks, 3),
            "us_each": round(running_s / count * 1e6, 1),
            "us_per_task": round(running_s / tasks * 1e6, 1),
            "answer_ms": round(answered_s / count * 1000, 2),
        }
        for name, (count, running_s, answered_s) in facts["jobs"].items()
        if count
    ]
    return sorted(rows, key=lambda row: -row["us_per_task"])[:TOP_JOBS]


def _places(facts: dict[str, Any], tasks: int) -> list[tuple[str, float]]:
    return [(place, round(us / tasks, 1)) for place, us in Counter(facts["samples"]).most_common(TOP_PLACES)]
