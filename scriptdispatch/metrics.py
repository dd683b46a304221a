"""Counters and histograms of one process, as plain data that travels with heartbeats and adds up (SPEC 12).

Children send snapshots to their master; the node's record carries the sum; `/metrics` shows it. Never a device or task id.
"""

from bisect import bisect_left
from collections import Counter
from typing import Any

PHASE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # "type|status|code"
        self.phases = {phase: [0] * (len(PHASE_BUCKETS) + 1) for phase in ("wait", "push", "run")}
        self.sums = dict.fromkeys(self.phases, 0.0)
        self.counts: Counter[str] = Counter()  # plain totals: quarantined_total, ...
        self.tick_lag: dict[str, float] = {}

    def finish(self, type: str, status: str, code: str | None) -> None:
        self.finished[f"{type}|{status}|{code or ''}"] += 1

    def observe(self, phase: str, ms: int | None) -> None:
        if ms is not None:
            seconds = ms / 1000
            self.phases[phase][bisect_left(PHASE_BUCKETS, seconds)] += 1
            self.sums[phase] += seconds

    def snapshot(self) -> dict[str, Any]:
        return {
            "finished_total": dict(self.finished),
            "phase_seconds": {
                phase: {"buckets": list(buckets), "sum": self.sums[phase], "count": sum(buckets)}
                for phase, buckets in self.phases.items()
            },
            "tick_lag_seconds": dict(self.tick_lag),
            **self.counts,
        }


def add(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Sums two snapshots, key by key; lists place by place."""
    total = dict(left)
    for key, value in right.items():
        total[key] = _plus(total[key], value) if key in total else value
    return total


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return add(left, right)
    if isinstance(left, list):
        return [a + b for a, b in zip(left, right, strict=True)]
    return left + right
