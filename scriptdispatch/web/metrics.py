"""`/metrics`: what the nodes' heartbeats carry, summed, and what store, queue and leases say now (SPEC 12).

Never a device or task id as a label.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from scriptdispatch.domain.model import STATUSES, NodeRecord
from scriptdispatch.metrics import PHASE_BUCKETS, add
from scriptdispatch.wiring import Backends

__all__ = ["CONTENT_TYPE", "exposition"]
PREFIX = "scriptdispatch_"
LOCK_PAGE = 1000
TOTALS = {
    "quarantined": "Messages quarantined.",
    "late_results": "Results that came after their execution was closed otherwise.",
    "locks_lost": "Devices granted by the lock while the store knew an open execution: expired, wiped or removed by hand.",
}


async def exposition(backends: Backends, own: dict[str, Any]) -> bytes:
    """All metrics as text. `own` is the snapshot of this process: what users end here is counted here."""
    counts, oldest, quarantined, ready = await asyncio.gather(
        backends.store.counts(), backends.store.oldest_due(), backends.store.quarantine_count(), backends.queue.ready()
    )
    nodes, leader, breaker, locks = await asyncio.gather(
        backends.leases.nodes(), backends.leases.leader(), backends.leases.breaker(), _count_locks(backends)
    )
    alive = [node for node, lives in nodes if lives]
    age = 0.0 if oldest is None else max(0.0, (backends.clock.now() - oldest).total_seconds())
    families: list[Metric] = [
        _gauge("tasks", "Tasks by status.", "status", {status: counts.get(status, 0) for status in STATUSES}),
        _gauge("ready", "Due tasks that wait, by priority.", "priority", ready),
        _plain("oldest_waiting_seconds", "How long the longest due task has waited.", age),
        _gauge("workers", "Workers by status.", "status", _worker_counts(nodes)),
        _plain("locks", "Device locks in force.", locks),
        *_lag([node.consumer_lag for node in alive if node.consumer_lag is not None]),
        _plain("leader", "1 if a node leads.", int(leader is not None)),
        _plain("breaker_open", "1 while central control counts as away.", int(breaker.open)),
        _plain("quarantine", "Messages in the quarantine.", quarantined),
        *_summed(nodes, own),
    ]
    registry = CollectorRegistry()
    registry.register(_Once(families))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


async def _count_locks(backends: Backends) -> int:
    total, after = 0, None
    while page := await backends.locks.all(after, LOCK_PAGE):
        total += len(page)
        after = page[-1].device_id
        if len(page) < LOCK_PAGE:
            break
    return total


def _lag(known: list[int]) -> list[Metric]:
    """No sample rather than a zero where it is not known (Pulsar tells it only to its admin API)."""
    return [_plain("consumer_lag", "Messages not acknowledged yet.", max(known))] if known else []


def _worker_counts(nodes: list[tuple[NodeRecord, bool]]) -> dict[str, int]:
    counts = dict.fromkeys(("starting", "ready", "stopping", "offline"), 0)
    for node, alive in nodes:
        for worker in node.workers:
            counts[worker.status if alive else "offline"] += 1
    return counts


def _summed(nodes: list[tuple[NodeRecord, bool]], own: dict[str, Any]) -> Iterator[Metric]:
    """Counters of all nodes of the last days, so that one that goes away does not take its counts with it."""
    total = {name: value for name, value in own.items() if name != "tick_lag_seconds"}
    lags: dict[str, float] = {}
    for node, alive in nodes:
        theirs = dict(node.metrics)
        ticks = theirs.pop("tick_lag_seconds", {})
        for timer, lag in ticks.items() if alive else ():
            lags[timer] = max(lag, lags.get(timer, 0.0))
        total = add(total, theirs)
    yield _finished(total.get("finished_total", {}))
    yield _phases(total.get("phase_seconds", {}))
    for name, text in TOTALS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=total.get(f"{name}_total", 0))
    yield _gauge("tick_lag_seconds", "How late each timer's last tick was.", "timer", lags)


def _finished(finished: dict[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + "finished", "Tasks finished.", labels=("type", "status", "code"))
    for key, count in finished.items():
        family.add_metric([*key.split("|"), "", ""][:3], count)
    return family


def _phases(phases: dict[str, dict[str, Any]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + "phase_seconds", "Seconds of each phase of an execution.", labels=("phase",))
    for phase, seen in phases.items():
        running, buckets = 0, []
        for bound, count in zip((*map(str, PHASE_BUCKETS), "+Inf"), seen["buckets"], strict=True):
            running += count
            buckets.append((bound, float(running)))
        family.add_metric((phase,), buckets, sum_value=seen["sum"])
    return family


def _gauge(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
