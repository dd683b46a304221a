"""The collections of the MongoDB store and their indexes. Every query names the index it walks (a test asks for the plan).

Few indexes hold what changes often: on a task's way to its end only `by_status`, `due_now` and `finished` move.
The unique ones are the wall of PROTOCOL ("Unique"): one open row per device, fences and attempts given once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.asynchronous.database import AsyncDatabase

TASKS: Final = "script_task"
SCRIPTS: Final = "script_code"
EXECUTIONS: Final = "task_execution"
LOGS: Final = "task_exec_log"
QUARANTINE: Final = "quarantine"
REMEMBERED: Final = "idempotency"
TOKENS: Final = "token"
META: Final = "meta"

UP, DOWN = ASCENDING, DESCENDING
BY_ID: Final = "_id_"
ONCE: Final = "once"  # each log line
# Of partial indexes. Any text is ≥ "": written so, and not as a `$type`, the planner sees that a query for given texts finds
# them all there (and walks it by steps, see `mongo_numbers.highest`). A query for a span of dates must say DATE itself.
TEXT: Final[dict[str, Any]] = {"$gte": ""}
DATE: Final[dict[str, Any]] = {"$type": "date"}
UNDER_WAY: Final[dict[str, Any]] = {"$in": ["running", "send_success"]}


def _index(
    name: str, keys: Sequence[tuple[str, int]], where: Mapping[str, Any] | None = None, unique: bool = False
) -> IndexModel:
    options: dict[str, Any] = {"name": name}
    if where is not None:
        options["partialFilterExpression"] = where
    if unique:
        options["unique"] = True
    return IndexModel(list(keys), **options)


INDEXES: Final[Mapping[str, Sequence[IndexModel]]] = {
    TASKS: (
        _index("dedupe", [("dedupe_key", UP)], {"dedupe_key": TEXT}, unique=True),
        _index("by_status", [("status", UP), ("_id", UP)]),
        _index("due_now", [("next_run_at", UP), ("_id", UP), ("status", UP)], {"next_run_at": DATE}),
        _index("to_cancel", [("cancel_requested_at", UP), ("_id", UP)], {"cancel_requested": True, "status": UNDER_WAY}),
        _index(
            "finished",
            [("finished_at", UP), ("status", UP), ("error.code", UP), ("first_started_at", UP)],
            {"finished_at": DATE},
        ),
        _index("by_error", [("error.code", UP), ("_id", UP)], {"error.code": TEXT}),
        _index("by_device", [("device_id", UP), ("_id", UP)], {"device_id": TEXT}),
        _index("by_unusual", [("unusual", UP), ("_id", UP)], {"unusual": TEXT}),
        _index("by_label", [("labels", UP), ("_id", UP)], {"labels": TEXT}),
        _index("by_tail", [("tail", UP), ("_id", UP)]),
    ),
    EXECUTIONS: (
        _index("active_device", [("device_id", UP)], {"active": True, "device_id": TEXT}, unique=True),
        _index("fence", [("device_id", UP), ("fencing_token", UP)], {"device_id": TEXT}, unique=True),
        _index("attempt", [("task_id", UP), ("attempt", UP)], unique=True),
        _index("open", [("active", UP), ("_id", UP)], {"active": True}),
        _index("deadline", [("deadline_at", UP), ("_id", UP)], {"active": True, "deadline_at": DATE}),
        _index("closed", [("finished_at", UP), ("_id", UP)], {"finished_at": DATE}),
    ),
    LOGS: (
        _index(ONCE, [("execution_id", UP), ("seqs", UP)], {"seqs": {"$exists": True}}, unique=True),
        _index("by_task", [("task_id", UP), ("_id", UP)]),
    ),
    REMEMBERED: (_index("age", [("begun_at", UP)]),),
}


async def create(database: AsyncDatabase[dict[str, Any]]) -> None:
    """Makes what is missing. Several processes may do it at once: the server makes each index once."""
    for collection, indexes in INDEXES.items():
        await database[collection].create_indexes(list(indexes))
