"""Why tasks wait: gathers what queue, locks and cluster say, for a whole page of tasks at once."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

from scriptdispatch.domain.model import EXECUTABLE, SENT, Breaker, Execution, NodeRecord, Task
from scriptdispatch.domain.waiting import Facts, WaitingFor, waiting_for
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.locks.port import Lock
from scriptdispatch.queue.port import Place
from scriptdispatch.wiring import Backends

Nodes = Sequence[tuple[NodeRecord, bool]]


async def why_waiting(backends: Backends, tasks: Sequence[Task]) -> dict[str, WaitingFor]:
    """By task id; those that move or are final are left out. Asks nobody about tasks that have nothing to wait for."""
    now = backends.clock.now()
    sent = [task for task in tasks if task.status == SENT]
    idle = [task for task in tasks if _is_due(task, now) or task.wait_code == "central_away"]
    executions = await _executions(backends, sent)
    facts = await _facts(backends, idle) if idle else {}
    found = {}
    for task in tasks:
        why = waiting_for(task, executions.get(task.execution_id or ""), facts.get(task.id, Facts()), now)
        if why is not None:
            found[task.id] = why
    return found


def only_time(task: Task, now: datetime) -> WaitingFor | None:
    """For a task created just now: it waits for its time, or it is on its way."""
    return waiting_for(task, None, Facts(leased=True), now)


def _is_due(task: Task, now: datetime) -> bool:
    return task.status in EXECUTABLE and not (task.next_run_at is not None and task.next_run_at > now)


async def _executions(backends: Backends, sent: Sequence[Task]) -> dict[str, Execution]:
    ids = [task.execution_id for task in sent if task.execution_id is not None]
    if not ids:
        return {}
    return {row.id: row for row in await backends.store.executions(ids) if row is not None}


async def _facts(backends: Backends, tasks: Sequence[Task]) -> dict[str, Facts]:
    devices = list({task.device_id for task in tasks if task.device_id is not None})
    try:
        places, locks, nodes, breaker, intact = await asyncio.gather(
            backends.queue.places([task.id for task in tasks]),
            backends.locks.holders(devices),
            backends.leases.nodes(),
            backends.leases.breaker(),
            backends.locks.intact(),
        )
    except QueueUnavailable:
        # Then nothing is handed out, which is what a task with a device says; nothing else is known.
        return {task.id: Facts(lock_service=False, workers=1, free=1) for task in tasks}
    return {task.id: _fact(task, places.get(task.id), locks, nodes, breaker, intact) for task in tasks}


def _fact(task: Task, place: Place | None, locks: dict[str, Lock], nodes: Nodes, breaker: Breaker, intact: bool) -> Facts:
    lock = locks.get(task.device_id) if task.device_id is not None else None
    workers, free = capacity(nodes, task.type)
    return Facts(
        position=place.position if place else None,
        leased=place.leased if place else False,
        holder=lock.value if lock else None,
        holder_task_id=lock.task_id if lock else None,
        holder_since=lock.since if lock else None,
        lock_service=intact,
        breaker=breaker,
        workers=workers,
        free=free,
    )


def capacity(nodes: Nodes, type: str) -> tuple[int, int]:
    """Live workers that serve the type, and the room left in them."""
    ready = [
        worker
        for node, alive in nodes
        if alive
        for worker in node.workers
        if worker.status == "ready" and (worker.task_types is None or type in worker.task_types)
    ]
    return len(ready), sum(max(0, worker.capacity - worker.load) for worker in ready)
