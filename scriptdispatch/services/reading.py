"""A task as a reader gets to see it: from the cache where there is one that has it, else from the store. Never to decide on:
whoever changes a task reads the store itself."""

import asyncio

from scriptdispatch.domain.model import Task
from scriptdispatch.errors import ScriptdispatchError
from scriptdispatch.store.port import Store
from scriptdispatch.wiring import Backends

SETTLED_WITHIN_S = 0.1


async def read_task(backends: Backends, task_id: str) -> Task | None:
    """None: there is no such task. What is answered is the same with and without a cache."""
    cache = backends.cache
    if cache is not None and (kept := await cache.get(task_id)) is not None:
        return kept
    [task] = await backends.store.tasks([task_id])
    if cache is not None and task is not None and cache.wants(task) and await _is_settled(backends.store, task):
        await cache.put(task)
    return task


async def _is_settled(store: Store, task: Task) -> bool:
    """A failover of the store may take back an end that was written just now: that may be answered once, but not kept."""
    try:
        async with asyncio.timeout(SETTLED_WITHIN_S):
            [again] = await store.tasks([task.id], settled=True)
    except (ScriptdispatchError, TimeoutError):
        return False  # the reader has his answer already; the next one asks again
    return again == task
