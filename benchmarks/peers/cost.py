"""CPU of processes and all that descends from them, in seconds."""

import contextlib
from collections.abc import Mapping

import psutil

Cost = dict[str, float]  # by role


def tree_s(pid: int) -> float:
    """The process, its living descendants, and the children that each of them has waited for."""
    process = psutil.Process(pid)
    total = _own_s(process)
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += _own_s(child)
    return total


def _own_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def alone_s(pid: int) -> float:
    """The process without those that it started: a master apart from its workers."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def snapshot(trees: Mapping[str, int], alone: Mapping[str, int]) -> Cost:
    return {role: tree_s(pid) for role, pid in trees.items()} | {role: alone_s(pid) for role, pid in alone.items()}


def per_task_us(before: Cost, after: Cost, tasks: int) -> Cost:
    return {role: round((after[role] - before[role]) / tasks * 1e6, 1) for role in after}


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
