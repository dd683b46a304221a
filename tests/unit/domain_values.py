"""Tasks and executions for tests of the domain, and the few lines that apply a change as a store would."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from scriptdispatch.domain.changes import ChangeExecution, ChangeTask
from scriptdispatch.domain.model import Error, Execution, Task

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
EARLIER = NOW - timedelta(minutes=5)


def make_task(**values: Any) -> Task:
    defaults: dict[str, Any] = {
        "id": "task-1",
        "name": "restart",
        "device_id": "dev-001",
        "lane_key": "2-0-task-1",
        "next_run_at": EARLIER,
        "created_at": EARLIER,
        "updated_at": EARLIER,
    }
    return Task(**{**defaults, **values})


def make_row(**values: Any) -> Execution:
    """An open execution. With `outcome` it is closed as K1 would close it, with the error of that outcome."""
    defaults: dict[str, Any] = {
        "id": "exec-2",
        "task_id": "task-1",
        "round": 1,
        "attempt": 2,
        "fencing_token": 2,
        "device_id": "dev-001",
        "script_id": "script-1",
        "timeout_seconds": 60,
        "worker_id": "worker-1",
        "node_id": "node-1",
        "from_status": "waiting",
        "previous_execution_id": None,
        "created_at": EARLIER,
    }
    if "outcome" in values:
        outcome = values["outcome"]
        defaults |= {"active": False, "closed_by": "somebody", "reason": f"closed: {outcome}", "finished_at": NOW}
        code = {
            "failed": "EXECUTION_FAILED",
            "refused": "DISPATCH_FAILED",
            "timeout": "TIMEOUT",
            "released": "LOCK_RELEASED",
            "handed_back": "SYSTEM_ERROR",
            "dropped": "CANCELED",
        }.get(outcome)
        defaults["error"] = Error(code=code, message=f"it ended {outcome}") if code else None
    return Execution(**{**defaults, **values})


def holds(record: Task | Execution, expect: dict[str, Any]) -> bool:
    return all(
        getattr(record, name) in wanted if isinstance(wanted, tuple) else getattr(record, name) == wanted
        for name, wanted in expect.items()
    )


def applied(record: Any, change: ChangeTask | ChangeExecution) -> Any:
    """The record after the change; an expectation that does not hold is a failure of the test."""
    assert holds(record, change.expect), f"{change.expect} does not hold"
    return msgspec.structs.replace(record, **change.set)
