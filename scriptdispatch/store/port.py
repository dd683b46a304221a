"""The store: the truth about tasks, scripts, executions and their logs.

It *applies* changes that `domain` has decided, and answers questions. It knows no policy. Every write is durable when
the call returns. Callers need not batch: an implementation commits together what arrives together (group commit) and
gives each caller its own outcomes. All methods raise `StoreUnavailable` when the store does not answer; with
`outcome_unknown` set a write may or may not have happened, and repeating it is safe.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from msgspec import Struct

from scriptdispatch.domain.changes import Applied, Change, ChangeExecution, InsertTask
from scriptdispatch.domain.model import (
    Execution,
    History,
    LogLine,
    Priority,
    Quarantined,
    Script,
    Status,
    StoredLine,
    Task,
    Token,
)

Moment = tuple[datetime, str]  # a time and an id: a place in the order of what happened


class TaskFilter(Struct, frozen=True, kw_only=True):
    """What `GET /tasks` may ask for. All that is given must hold. `before_id` is the cursor: older than that task."""

    statuses: tuple[Status, ...] = ()
    ids: tuple[str, ...] = ()
    device_id: str | None = None
    type: str | None = None
    priority: Priority | None = None
    labels: tuple[tuple[str, str], ...] = ()
    error_code: str | None = None
    dedupe_key: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    before_id: str | None = None


class LogQuery(Struct, frozen=True, kw_only=True):
    """`after` and `before` are cursors (exclusive). `tail`: the last N. In order of arrival, over all executions."""

    task_id: str
    after: int | None = None
    before: int | None = None
    tail: int | None = None
    limit: int = 500
    execution_id: str | None = None
    stream: str | None = None
    contains: str | None = None


class Remembered(Struct, frozen=True, kw_only=True):
    """A request under an Idempotency-Key. `seed` fixes the ids it creates, so a repeat creates nothing twice.
    `answer` is None while the first is under way (or died)."""

    seed: str
    request_hash: str
    begun_at: datetime
    status: int | None = None
    answer: bytes | None = None


class Stats(Struct, frozen=True, kw_only=True):
    finished: dict[str, int]  # by status, in the span
    per_minute: list[tuple[datetime, int, int]]  # minute, succeeded, failed
    errors: dict[str, int]  # by error code
    wait_ms: tuple[int | None, int | None]  # p50, p95, of the newest 10,000 executions of the span
    push_ms: tuple[int | None, int | None]
    run_ms: tuple[int | None, int | None]
    duration_ms: tuple[int | None, int | None]  # of tasks: first start to end


class Store(Protocol):
    async def open(self) -> None:
        """Connects, and creates what is missing (tables, indexes). Safe when several processes do it at once."""
        ...

    async def close(self) -> None: ...

    async def ping(self) -> str:
        """One line about the server and its version, for readiness and doctor."""
        ...

    # --- writes

    async def commit(self, changes: Sequence[Change], *, term: int | None = None, soon: bool = False) -> list[Applied]:
        """Applies each change if its expectation holds; outcomes in the order given. Each is atomic in itself, in no
        promised order and not all-or-nothing together. A repeated InsertTask or InsertExecution with the same id is won
        again and changes nothing. With `term`, nothing is applied and `StaleTerm` is raised if a newer leader's term has
        been seen.

        `soon`: tasks that are inserted may still be taken back by a failure of the store, until `confirm` says that they are
        durable. All other changes are durable at once, and with them every task that they found."""
        ...

    async def confirm(self, inserts: Sequence[InsertTask], outcomes: Sequence[Applied]) -> None:
        """Of tasks that were committed `soon`: when it returns, those that were won are durable, and so is all that could be
        read when it was called."""
        ...

    async def append_logs(
        self, lines: Sequence[LogLine], *, max_per_execution: int, there: Mapping[str, int] | None = None
    ) -> int:
        """Stores lines in the order given; one whose (execution, seq) is there already is skipped. Beyond the limit they
        are counted in the execution's `log_dropped`, not stored. Answers how many were stored. `there` says how many lines
        each execution had when its caller read it just now: a store may use it instead of reading."""
        ...

    async def append_and_close(
        self,
        lines: Sequence[LogLine],
        closing: Sequence[ChangeExecution],
        *,
        max_per_execution: int,
        there: Mapping[str, int] | None = None,
    ) -> list[Applied]:
        """C1 and C2 of one batch: as `append_logs`, then `commit` of the changes that close rows, in as few writes as the
        store can. Answers what became of the changes. If it raises, any part of it may have been done, or none; all of it
        may be repeated."""
        ...

    async def quarantine(self, items: Sequence[Quarantined]) -> None:
        """Stores them; an id that is there already is skipped."""
        ...

    async def unquarantine(self, id: str) -> bool: ...

    async def remember(self, owner: str, key: str, request: Remembered) -> Remembered | None:
        """None: this is the first under (owner, key), and it is stored now. Else the one that was first."""
        ...

    async def take_over(self, owner: str, key: str, begun_at: datetime, now: datetime) -> bool:
        """Takes over a remembered request without answer, begun at `begun_at`, whose process seems dead. One wins."""
        ...

    async def answer(self, owner: str, key: str, status: int, body: bytes) -> None: ...

    async def forget(self, owner: str, key: str) -> None:
        """Drops a remembered request that ended in an error and created nothing."""
        ...

    async def save_token(self, token: Token) -> None: ...

    async def purge(self, finished_before: datetime, limit: int) -> int:
        """Removes final tasks with executions, logs, history and labels, oldest first; a device's highest fence stays."""
        ...

    async def purge_logs(self, before: datetime, limit: int) -> int: ...

    async def purge_remembered(self, before: datetime) -> int: ...

    async def warnings(self) -> list[str]:
        """What works and should be otherwise, each in a sentence that says what to do."""
        ...

    # --- reads: tasks

    async def tasks(self, ids: Sequence[str], *, settled: bool = False) -> list[Task | None]:
        """In the order asked; None for an unknown id. Never older than this process's own completed writes. With `settled`
        only what no failure of the store can take back any more: it may be behind what is read without."""
        ...

    async def list_tasks(self, where: TaskFilter, limit: int) -> list[Task]:
        """Newest first."""
        ...

    async def find_id(self, tail: str) -> list[str]:
        """Ids of tasks that end in `tail` (8 or more characters), at most 5."""
        ...

    async def history(self, task_id: str) -> list[History]:
        """Oldest first, the last 500."""
        ...

    async def scripts(self, ids: Sequence[str]) -> list[Script | None]: ...

    async def due_tasks(self, until: datetime, after: Moment | None, limit: int) -> list[Moment]:
        """R5: when executable tasks with `next_run_at` ≤ until are due, and their ids, in this order, from after the given
        place on. From the index alone: a long queue is looked through every few seconds."""
        ...

    async def statuses(self, ids: Sequence[str]) -> dict[str, Status]:
        """Of those that are there."""
        ...

    async def tasks_under_way(self, after: str | None, limit: int) -> list[Task]:
        """R3: tasks in `running` or `send_success`, by id, from after the given one on."""
        ...

    async def cancels_to_ask(self, limit: int) -> list[Task]:
        """U3: tasks under way whose cancel was requested, oldest request first."""
        ...

    async def counts(self) -> dict[str, int]:
        """Tasks by status."""
        ...

    async def oldest_due(self) -> datetime | None:
        """`next_run_at` of the executable task that has been due longest."""
        ...

    async def stats(self, since: datetime, until: datetime) -> Stats: ...

    # --- reads: executions

    async def executions(self, ids: Sequence[str]) -> list[Execution | None]: ...

    async def executions_of(self, task_id: str) -> list[Execution]:
        """By attempt."""
        ...

    async def open_executions(
        self,
        *,
        devices: Sequence[str] | None = None,
        worker_ids: Sequence[str] | None = None,
        unstamped_before: datetime | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Execution]:
        """Open rows, by id, from after the given one on; narrowed by whatever is given (M1, M2, R2, R4, D1)."""
        ...

    async def overdue_executions(self, now: datetime, limit: int) -> list[Execution]:
        """T1: open, stamped rows whose `deadline_at` has passed, longest first."""
        ...

    async def closed_executions(self, after: Moment, until: datetime, limit: int) -> list[Moment]:
        """R3: when rows were closed, and their ids, in this order: behind `after`, before `until`. From the index alone, so
        that looking often costs little."""
        ...

    # --- reads: the rest

    async def logs(self, query: LogQuery) -> list[StoredLine]: ...

    async def log_totals(self, task_id: str) -> tuple[int, int]:
        """Lines stored and lines dropped, over all executions of the task."""
        ...

    async def quarantined(self, limit: int, before_id: str | None = None) -> list[Quarantined]:
        """Newest first."""
        ...

    async def quarantined_one(self, id: str) -> Quarantined | None: ...

    async def quarantine_count(self) -> int: ...

    async def tokens(self) -> list[Token]: ...


Document = dict[str, Any]
