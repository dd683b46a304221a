"""Devices as locks, lanes and central control show them (`GET /devices`)."""

import asyncio
from typing import Any, Literal

from scriptdispatch import ids
from scriptdispatch.central.client import CentralControl
from scriptdispatch.domain.model import Execution
from scriptdispatch.errors import CentralUnavailable, Refused
from scriptdispatch.locks.port import Lock
from scriptdispatch.services.fields import format_time
from scriptdispatch.wiring import Backends

LANE_SHOWN = 500
State = Literal["busy", "waiting"]


async def device_page(backends: Backends, state: State | None, after: str | None, limit: int) -> dict[str, Any]:
    """Devices with a lock or a lane, by id. `busy`: those with a lock; `waiting`: those with a lane."""
    locks = await backends.locks.all(after, limit + 1) if state != "waiting" else []
    lanes = await backends.queue.lanes(after, limit + 1) if state != "busy" else []
    found = sorted({lock.device_id for lock in locks} | {lane.device_id for lane in lanes})
    shown = found[:limit]
    held = {lock.device_id: lock for lock in locks}
    if state == "waiting":
        held = await backends.locks.holders(shown)
    lengths = {lane.device_id: lane.length for lane in lanes}
    rows = await _rows(backends, [held[id] for id in shown if id in held])
    items = [_item(backends, id, held.get(id), rows, lengths.get(id, 0)) for id in shown]
    if state == "busy":
        for item in items:
            item["waiting"] = len(await backends.queue.lane(item["id"], LANE_SHOWN))
    return {"items": items, "next_cursor": shown[-1] if len(found) > limit else None}


async def device_view(backends: Backends, central: CentralControl, device_id: str) -> dict[str, Any]:
    """One device. Central control being away does not hide what we know ourselves."""
    known, trouble = await _ask(central, device_id)
    locks, lane = await asyncio.gather(backends.locks.holders([device_id]), backends.queue.lane(device_id, LANE_SHOWN))
    lock = locks.get(device_id)
    if known is None and trouble is None and lock is None and not lane:
        raise Refused(404, "device_not_found", f"central control does not know device {device_id[:200]}")
    rows = await _rows(backends, [lock] if lock else [])
    view = {
        "id": device_id,
        "central": known,
        "lock": _lock_view(backends, lock, rows) if lock else None,
        "lane": [{"task_id": task_id, "position": place} for place, task_id in enumerate(lane, 1)],
    }
    if trouble is not None:
        view["central_error"] = trouble
    return view


async def _ask(central: CentralControl, device_id: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return await central.device(device_id), None
    except CentralUnavailable as error:
        return None, str(error)


async def _rows(backends: Backends, locks: list[Lock]) -> dict[str, Execution]:
    ours = [lock.value for lock in locks if ids.is_id(lock.value)]
    if not ours:
        return {}
    return {row.id: row for row in await backends.store.executions(ours) if row is not None}


def _item(backends: Backends, id: str, lock: Lock | None, rows: dict[str, Execution], waiting: int) -> dict[str, Any]:
    return {"id": id, "lock": _lock_view(backends, lock, rows) if lock else None, "waiting": waiting}


def _lock_view(backends: Backends, lock: Lock, rows: dict[str, Execution]) -> dict[str, Any]:
    """A value that is no execution of ours is shown as `holder`."""
    row = rows.get(lock.value)
    age = (backends.clock.now() - lock.since).total_seconds() if lock.since else None
    return {
        "task_id": lock.task_id,
        "execution_id": lock.value if ids.is_id(lock.value) else None,
        "holder": lock.value[:200],
        "fencing_token": row.fencing_token if row else None,
        "since": format_time(lock.since),
        "age_seconds": None if age is None else round(max(0.0, age), 3),
    }
