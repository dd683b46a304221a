"""What `POST /tasks/check` answers: how a task would look, and what would become of it. Stores nothing."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

from scriptdispatch.domain import retry as retries
from scriptdispatch.domain.model import Retry
from scriptdispatch.domain.render import render
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.services.create import Creator, Draft, bad_syntax
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.syntax import Verdict
from scriptdispatch.services.views import MASK
from scriptdispatch.wiring import Backends

SHOWN = 10
LANE_SHOWN = 1000


async def dry_run_view(creator: Creator, backends: Backends, body: Any) -> dict[str, Any]:
    found = await creator.check(body)
    draft: Draft = found["draft"]
    now = backends.clock.now()
    due_at = max(draft.due_at, now)
    refusal = found["refusal"]
    verdict: Verdict = found["verdict"]
    return {
        "valid": verdict.ok is not False and refusal is None,
        "rendered": _rendered(draft),
        "syntax": _syntax(verdict, secret=bool(draft.body.secret_params)),
        "device": {"id": draft.body.device_id, "central": found["device"], "error": refusal.detail if refusal else None}
        if draft.body.device_id
        else None,
        "lane": await _lane(backends, draft.body.device_id),
        "next_run_at": format_time(due_at),
        "retries": [
            format_time(at) for at in next_retries(draft.body.retry.record() if draft.body.retry else Retry(), due_at)
        ],
    }


def _rendered(draft: Draft) -> str:
    """With the secrets masked: this is for people to look at."""
    assert draft.script is not None
    params = draft.body.params
    if params is None or not draft.body.secret_params:
        return draft.rendered
    return render(draft.script.content, {k: MASK if k in draft.body.secret_params else v for k, v in params.items()})


def _syntax(verdict: Verdict, *, secret: bool) -> dict[str, Any]:
    message = bad_syntax(verdict, secret=secret).errors[0]["message"] if verdict.ok is False else None
    return {"checked": verdict.ok is not None, "ok": verdict.ok, "message": message, "line": verdict.line}


async def _lane(backends: Backends, device_id: str | None) -> dict[str, Any] | None:
    if device_id is None:
        return None
    try:
        lane, locks = await asyncio.gather(backends.queue.lane(device_id, LANE_SHOWN), backends.locks.holders([device_id]))
    except QueueUnavailable:
        return None
    lock = locks.get(device_id)
    return {"waiting": len(lane), "busy": lock is not None, "task_id": lock.task_id if lock else None}


def next_retries(retry: Retry, first: datetime) -> list[datetime]:
    """The next ten, if every attempt failed as soon as it began, without jitter."""
    times: list[datetime] = []
    failed_at = first
    while len(times) < SHOWN and retries.retries_left(retry, len(times)):
        try:
            failed_at = retries.retry_at(retry, len(times) + 1, failed_at, first, 0.0)
        except OverflowError:
            break
        times.append(max(failed_at, times[-1] if times else failed_at + timedelta(0)))
    return times
