"""Changes as values: what is expected, what is written. The store applies them, never decides (PROTOCOL).

Made only by the named constructors of `lifecycle`. In `expect`, a field maps to the value it must have (None means
absent) or to a tuple of allowed values.
"""

from typing import Any

from msgspec import Struct

from scriptdispatch.domain.model import Execution, History, Script, Task


class InsertTask(Struct, frozen=True, kw_only=True):
    """Lost on a duplicate `dedupe_key`: the outcome names the task that has it. The same id again is won ("ours")."""

    task: Task
    script: Script | None
    history: History


class InsertExecution(Struct, frozen=True, kw_only=True):
    """W3. The store gives fence and attempt: highest + 1. Lost if the device has an open row: the outcome names it.
    The same id again is won ("ours already"), with the numbers it was given. `fence_hint`: what the lock service remembers
    of the device's highest fence; a store may begin with it instead of reading, and reads if it was wrong."""

    execution: Execution
    fence_hint: int | None = None


class ChangeTask(Struct, frozen=True, kw_only=True):
    task_id: str
    expect: dict[str, Any]
    set: dict[str, Any]
    history: History | None = None


class ChangeExecution(Struct, frozen=True, kw_only=True):
    execution_id: str
    expect: dict[str, Any]
    set: dict[str, Any]


Change = InsertTask | InsertExecution | ChangeTask | ChangeExecution


class Applied(Struct, frozen=True, kw_only=True):
    """What became of one change. `won` False: the expectation did not hold, and nothing was written."""

    won: bool
    holder: str | None = None  # InsertTask: id with the same dedupe_key; InsertExecution: the device's open execution
    attempt: int | None = None  # InsertExecution
    fencing_token: int | None = None  # InsertExecution
    reign: bytes | None = None  # InsertTask: of the store's primary that has it, if the store has such
