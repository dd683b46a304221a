"""How the SQLite store reads: the texts of its queries, and those that are put together from a filter.

Each names the index it walks (`INDEXED BY`): a plan never depends on what the planner guesses, and a test asks for it.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from scriptdispatch.domain.model import STATUSES, Execution, StoredLine, Task
from scriptdispatch.sqlite import Connection
from scriptdispatch.store.port import LogQuery, Stats, TaskFilter
from scriptdispatch.store.sqlite_rows import (
    EXECUTION,
    HISTORY,
    LOG,
    QUARANTINE,
    SCRIPT,
    TASK,
    Table,
    fetch,
    from_ms,
    to_json,
    to_ms,
)
from scriptdispatch.store.sqlite_schema import EXECUTABLE_NOW, UNDER_WAY_NOW
from scriptdispatch.store.summary import MINUTE_MS, NEWEST, build_stats

Query = tuple[str, list[Any]]
LAST: Final = "~"  # greater than every id
# An id carries the time it was made, `created_at` the time of the request: equal but for a clock that was set back, or
# an idempotent request that somebody took over later. So the id narrows the walk, and `created_at` decides.
ID_SLACK: Final = timedelta(hours=25)


def by_ids(table: Table[Any]) -> str:
    """The rows of a JSON list of ids, in any order."""
    columns = ", ".join(f"t.{name}" for name in table.columns)
    return f"SELECT {columns} FROM json_each(?) AS j CROSS JOIN {table.name} AS t ON t.id = j.value"


TASKS_BY_ID: Final = by_ids(TASK)
STATUSES_BY_ID: Final = "SELECT id, status FROM script_task WHERE id IN (SELECT value FROM json_each(?))"
SCRIPTS_BY_ID: Final = by_ids(SCRIPT)
EXECUTIONS_BY_ID: Final = by_ids(EXECUTION)
FIND_ID: Final = "SELECT id FROM script_task WHERE substr(id, -8) = ? AND substr(id, -?) = ? ORDER BY id DESC LIMIT 5"
HISTORY_OF: Final = f"SELECT {HISTORY.select} FROM task_history WHERE task_id = ? ORDER BY n"
DUE: Final = (
    f"SELECT next_run_at, id FROM script_task INDEXED BY task_due WHERE {EXECUTABLE_NOW} AND next_run_at <= ? "
    "AND (next_run_at, id) > (?, ?) ORDER BY next_run_at, id LIMIT ?"
)
OLDEST_DUE: Final = (
    f"SELECT next_run_at FROM script_task INDEXED BY task_due WHERE {EXECUTABLE_NOW} AND next_run_at <= ? "
    "ORDER BY next_run_at LIMIT 1"
)
UNDER_WAY: Final = (
    f"SELECT {TASK.select} FROM script_task INDEXED BY task_by_status WHERE status = ? AND id > ? ORDER BY id LIMIT ?"
)
TO_CANCEL: Final = (
    f"SELECT {TASK.select} FROM script_task INDEXED BY task_to_cancel WHERE cancel_requested = 1 AND {UNDER_WAY_NOW} "
    "AND cancel_requested_at >= 0 ORDER BY cancel_requested_at, id LIMIT ?"
)
COUNTS: Final = "SELECT name, n FROM tally"
EXECUTIONS_OF: Final = (
    f"SELECT {EXECUTION.select} FROM task_execution INDEXED BY execution_attempt WHERE task_id = ? ORDER BY attempt"
)
OVERDUE: Final = (
    f"SELECT {EXECUTION.select} FROM task_execution INDEXED BY execution_deadline WHERE active = 1 "
    "AND deadline_at IS NOT NULL AND deadline_at < ? AND sending_at IS NOT NULL ORDER BY deadline_at, id LIMIT ?"
)
CLOSED: Final = (
    "SELECT finished_at, id FROM task_execution INDEXED BY execution_closed "
    "WHERE (finished_at, id) > (?, ?) AND finished_at < ? AND finished_at IS NOT NULL ORDER BY finished_at, id LIMIT ?"
)
LOG_TOTALS: Final = (
    "SELECT coalesce(sum(log_lines), 0), coalesce(sum(log_dropped), 0) FROM task_execution INDEXED BY execution_attempt "
    "WHERE task_id = ?"
)
QUARANTINED: Final = f"SELECT {QUARANTINE.select} FROM quarantine WHERE id < ? ORDER BY id DESC LIMIT ?"
QUARANTINED_ONE: Final = f"SELECT {QUARANTINE.select} FROM quarantine WHERE id = ?"

ENDED: Final = (
    f"SELECT finished_at / {MINUTE_MS} AS minute, status, error_code, count(*) FROM script_task INDEXED BY task_finished "
    "WHERE finished_at IS NOT NULL AND finished_at >= ? AND finished_at < ? GROUP BY minute, status, error_code"
)
DURATIONS: Final = (
    "SELECT finished_at - first_started_at FROM script_task INDEXED BY task_finished WHERE finished_at IS NOT NULL "
    f"AND finished_at >= ? AND finished_at < ? ORDER BY finished_at DESC LIMIT {NEWEST}"
)
PHASES: Final = (
    # As `model.phases_ms`: what was certainly not taken did not run.
    "SELECT wait_ms, CASE WHEN push IN ('not_sent', 'refused') THEN max(0, finished_at - sending_at) "
    "ELSE max(0, answered_at - sending_at) END, "
    "CASE WHEN push NOT IN ('not_sent', 'refused') THEN max(0, finished_at - coalesce(sent_at, sending_at)) END "
    "FROM task_execution INDEXED BY execution_closed WHERE finished_at IS NOT NULL "
    f"AND finished_at >= ? AND finished_at < ? ORDER BY finished_at DESC LIMIT {NEWEST}"
)


# --------------------------------------------------------------------------------------------------------------- tasks


def task_queries(where: TaskFilter, limit: int) -> list[Query]:
    """What answers the filter: one query, or one for each status where the walk is by status, as the index is in the
    order of ids within one status only. Walks by what narrows most."""
    if where.statuses and not set(STATUSES) - set(where.statuses):
        where = _without_statuses(where)
    if where.statuses and not (where.ids or where.dedupe_key or where.labels or where.device_id or where.error_code):
        return [_by_index("task_by_status", [("t.status = ?", status)], where, limit) for status in set(where.statuses)]
    residual = _status_condition(where.statuses)
    if where.ids:
        return [_walk("script_task AS t", "t.id", [("t.id IN (SELECT value FROM json_each(?))", to_json(where.ids))],
                      where, residual, limit)]  # fmt: skip
    if where.dedupe_key is not None:
        return [_by_index("task_dedupe", [("t.dedupe_key = ?", where.dedupe_key)], where, limit, residual)]
    if where.labels:
        return [_by_label(where, residual, limit)]
    if where.device_id is not None:
        return [_by_index("task_by_device", [("t.device_id = ?", where.device_id)], where, limit, residual)]
    if where.error_code is not None:
        return [_by_index("task_by_error", [("t.error_code = ?", where.error_code)], where, limit, residual)]
    if where.type is not None:
        return [_by_index("task_by_type", [("t.type = ?", where.type)], where, limit)]
    if where.priority is not None:
        return [_by_index("task_by_priority", [("t.priority = ?", where.priority)], where, limit)]
    return [_walk("script_task AS t", "t.id", [], where, [], limit)]


Condition = tuple[str, Any]


def _without_statuses(where: TaskFilter) -> TaskFilter:
    return replace(where, statuses=())


def _status_condition(statuses: Sequence[str]) -> list[Condition]:
    return [("t.status IN (SELECT value FROM json_each(?))", to_json(statuses))] if statuses else []


def _by_index(index: str, lead: list[Condition], where: TaskFilter, limit: int, residual: Sequence[Condition] = ()) -> Query:
    return _walk(f"script_task AS t INDEXED BY {index}", "t.id", lead, where, residual, limit)


def _by_label(where: TaskFilter, residual: Sequence[Condition], limit: int) -> Query:
    """Walks the first label's tasks; CROSS JOIN keeps that order."""
    (name, value), *others = where.labels
    lead: list[Condition] = [("l.name = ?", name), ("l.value = ?", value)]
    sql, values = _walk("task_label AS l CROSS JOIN script_task AS t ON t.id = l.task_id", "l.task_id", lead, where,
                        residual, limit, others)  # fmt: skip
    return sql, values


def _walk(
    source: str,
    order: str,
    lead: Sequence[Condition],
    where: TaskFilter,
    residual: Sequence[Condition],
    limit: int,
    labels: Sequence[tuple[str, str]] | None = None,
) -> Query:
    conditions = [*lead, (f"{order} < ?", where.before_id or LAST), *_plain_conditions(where, order), *residual]
    texts = [text for text, _ in conditions]
    values = [value for _, value in conditions]
    for name, value in where.labels if labels is None else labels:
        texts.append("EXISTS (SELECT 1 FROM task_label AS m WHERE m.name = ? AND m.value = ? AND m.task_id = t.id)")
        values += [name, value]
    columns = ", ".join(f"t.{column}" for column in TASK.columns)
    return f"SELECT {columns} FROM {source} WHERE {' AND '.join(texts)} ORDER BY {order} DESC LIMIT ?", [*values, limit]


def _plain_conditions(where: TaskFilter, order: str) -> Iterator[Condition]:
    for column in ("device_id", "type", "priority", "error_code", "dedupe_key"):
        value = getattr(where, column)
        if value is not None:
            yield f"t.{column} = ?", value
    if where.created_after is not None:
        yield "t.created_at >= ?", to_ms(where.created_after)
        yield f"{order} >= ?", id_at(where.created_after - ID_SLACK)
    if where.created_before is not None:
        yield "t.created_at < ?", to_ms(where.created_before)
        yield f"{order} < ?", id_at(where.created_before + ID_SLACK)


def id_at(at: datetime) -> str:
    """Where the ids of that millisecond begin."""
    ms = max(0, to_ms(at))
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}"


def list_tasks(db: Connection, queries: Sequence[Query], limit: int) -> list[Task]:
    found = [TASK.from_row(row) for sql, values in queries for row in fetch(db, sql, values)]
    if len(queries) > 1:
        found.sort(key=lambda task: task.id, reverse=True)
    return found[:limit]


def under_way(db: Connection, after: str, limit: int) -> list[Task]:
    rows = [row for status in ("running", "send_success") for row in fetch(db, UNDER_WAY, (status, after, limit))]
    rows.sort(key=lambda row: str(row[0]))
    return [TASK.from_row(row) for row in islice(rows, limit)]


def stats(db: Connection, since: datetime, until: datetime) -> Stats:
    span = (to_ms(since), to_ms(until))
    ended = [(from_ms(minute * MINUTE_MS), status, code, n) for minute, status, code, n in fetch(db, ENDED, span)]
    phases = fetch(db, PHASES, span)
    return build_stats(ended, phases, [ms for (ms,) in fetch(db, DURATIONS, span)])


# ---------------------------------------------------------------------------------------------------------- executions


def open_query(
    devices: Sequence[str] | None,
    worker_ids: Sequence[str] | None,
    unstamped_before: datetime | None,
    after: str | None,
    limit: int,
) -> Query:
    """Walks the open rows, which are as many as scripts are under way; by device where devices are given."""
    columns = ", ".join(f"t.{name}" for name in EXECUTION.columns)
    if devices is None:
        source, texts, values = "task_execution AS t INDEXED BY execution_open", ["t.active = 1"], list[Any]()
    else:
        source = "json_each(?) AS j CROSS JOIN task_execution AS t INDEXED BY execution_active ON t.device_id = j.value"
        texts, values = ["t.active = 1", "t.device_id IS NOT NULL"], [to_json(list(dict.fromkeys(devices)))]
    texts.append("t.id > ?")
    values.append(after or "")
    if worker_ids is not None:
        texts.append("t.worker_id IN (SELECT value FROM json_each(?))")
        values.append(to_json(list(worker_ids)))
    if unstamped_before is not None:
        texts.append("t.sending_at IS NULL AND t.created_at < ?")
        values.append(to_ms(unstamped_before))
    return f"SELECT {columns} FROM {source} WHERE {' AND '.join(texts)} ORDER BY t.id LIMIT ?", [*values, limit]


def executions(db: Connection, sql: str, values: Sequence[Any]) -> list[Execution]:
    return [EXECUTION.from_row(row) for row in fetch(db, sql, values)]


# ---------------------------------------------------------------------------------------------------------------- logs


def log_query(query: LogQuery) -> tuple[Query, bool]:
    """The query, and whether its rows come last first (the end of a log is found from its end)."""
    texts, values = ["task_id = ?"], [query.task_id]
    conditions: list[tuple[str, Any]] = [
        ("cursor > ?", query.after),
        ("cursor < ?", query.before),
        ("execution_id = ?", query.execution_id),
        ("stream = ?", query.stream),
        ("instr(content, ?) > 0", query.contains or None),
    ]
    given = [(text, value) for text, value in conditions if value is not None]
    texts += [text for text, _ in given]
    backwards = query.tail is not None or (query.before is not None and query.after is None)
    limit = query.limit if query.tail is None else query.tail
    sql = (
        f"SELECT cursor, {LOG.select} FROM task_exec_log INDEXED BY log_by_task WHERE {' AND '.join(texts)} "
        f"ORDER BY cursor {'DESC' if backwards else 'ASC'} LIMIT ?"
    )
    return (sql, [*values, *(value for _, value in given), limit]), backwards


def logs(db: Connection, query: LogQuery) -> list[StoredLine]:
    (sql, values), backwards = log_query(query)
    lines = [StoredLine(cursor=row[0], line=LOG.from_row(row[1:])) for row in fetch(db, sql, values)]
    return lines[::-1] if backwards else lines
