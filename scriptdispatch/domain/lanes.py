"""The order in which tasks leave: priority, then due time, then age, as one sortable key kept on the task.

Within a lane and between lanes the smaller key goes first. It is a string, so every store and Redis sort it alike.
"""

from datetime import datetime
from typing import Final, Literal

from scriptdispatch.domain.model import Priority

QueueStrategy = Literal["priority", "fifo"]
_RANK: Final[dict[str, str]] = {"high": "1", "normal": "2", "low": "3"}


def lane_key(task_id: str, priority: Priority, due_at: datetime, strategy: QueueStrategy = "priority") -> str:
    """`<rank>-<due, ms>-<id>`; ids are time-ordered, so the id is the age."""
    rank = "2" if strategy == "fifo" else _RANK[priority]
    return f"{rank}-{int(due_at.timestamp() * 1000):014d}-{task_id}"


def lane_of(task_id: str, device_id: str | None) -> str:
    """The name of the lane. A task without a device is a lane of its own; a device id never starts with '~'."""
    return device_id if device_id is not None else f"~{task_id}"


def priority_of(key: str) -> str:
    return {"1": "high", "2": "normal", "3": "low"}[key[0]]
