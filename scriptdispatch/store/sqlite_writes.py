"""How the SQLite store writes. Functions of a connection that is inside a write transaction (in the writer thread).

What can be worked out beforehand (encoding, statement texts) is done by `prepare` in the caller's thread, so that the
file's one write lock is held for the statements alone.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from scriptdispatch.domain.changes import Applied, Change, ChangeExecution, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import History, LogLine
from scriptdispatch.errors import StaleTerm
from scriptdispatch.sqlite import Connection
from scriptdispatch.store.sqlite_rows import EXECUTION, HISTORY, LOG, SCRIPT, TASK, fetch, to_ms
from scriptdispatch.store.summary import HISTORY_KEPT

Step = Callable[[Connection], Applied]

_WON: Final = Applied(won=True)
_LOST: Final = Applied(won=False)

_INSERT_SCRIPT: Final = f"INSERT INTO script_code ({SCRIPT.select}) VALUES ({SCRIPT.places}) ON CONFLICT DO NOTHING"
_INSERT_TASK: Final = f"INSERT INTO script_task ({TASK.select}) VALUES ({TASK.places}) ON CONFLICT DO NOTHING"
_INSERT_LABEL: Final = "INSERT INTO task_label (name, value, task_id) VALUES (?, ?, ?)"
_HOLDER_OF_KEY: Final = "SELECT id FROM script_task WHERE dedupe_key = ?"
_HAS_TASK: Final = "SELECT 1 FROM script_task WHERE id = ?"

# The number first, then the insert: RETURNING would build a temporary table each time, five times the cost of both.
_LAST_HISTORY: Final = "SELECT n FROM task_history WHERE task_id = ? ORDER BY n DESC LIMIT 1"
_INSERT_HISTORY: Final = f"INSERT INTO task_history (task_id, n, {HISTORY.select}) VALUES (?, ?, {HISTORY.places})"
_TRIM_HISTORY: Final = "DELETE FROM task_history WHERE task_id = ? AND n <= ?"

_NUMBERS: Final = (
    "SELECT (SELECT coalesce(max(attempt), 0) + 1 FROM task_execution WHERE task_id = ?), "
    "(SELECT coalesce(max(fencing_token), 0) + 1 FROM task_execution WHERE device_id = ? AND device_id IS NOT NULL)"
)
_INSERT_EXECUTION: Final = (
    f"INSERT INTO task_execution ({EXECUTION.select}) VALUES ({EXECUTION.places}) ON CONFLICT DO NOTHING"
)
_ATTEMPT: Final = EXECUTION.columns.index("attempt")
_FENCE: Final = EXECUTION.columns.index("fencing_token")
_OURS_ALREADY: Final = "SELECT attempt, fencing_token FROM task_execution WHERE id = ?"
_HOLDER_OF_DEVICE: Final = (
    "SELECT id FROM task_execution INDEXED BY execution_active WHERE device_id = ? AND active = 1 AND device_id IS NOT NULL"
)

_INSERT_LINE: Final = f"INSERT INTO task_exec_log (stored_at, {LOG.select}) VALUES (?, {LOG.places}) ON CONFLICT DO NOTHING"
_HAS_LINE: Final = "SELECT 1 FROM task_exec_log INDEXED BY log_once WHERE execution_id = ? AND seq = ?"
_LINES_OF: Final = "SELECT log_lines FROM task_execution WHERE id = ?"
_COUNT_LINES: Final = "UPDATE task_execution SET log_lines = log_lines + ?, log_dropped = log_dropped + ? WHERE id = ?"


def prepare(change: Change) -> Step:
    """The change as a step that only has statements left to run."""
    if isinstance(change, ChangeTask):
        return _change_task(change)
    if isinstance(change, ChangeExecution):
        return _change_execution(change)
    if isinstance(change, InsertExecution):
        return _insert_execution(change)
    return _insert_task(change)


def check_term(db: Connection, term: int) -> None:
    """In the transaction of the changes themselves, so that no newer leader can come between."""
    rows = fetch(db, "SELECT value FROM meta WHERE name = 'term'")
    seen = rows[0][0] if rows else None
    if seen is not None and seen > term:
        raise StaleTerm(f"term {term} is over: term {seen} has written already")
    if seen != term:
        db.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('term', ?)", (term,))


def _change_task(change: ChangeTask) -> Step:
    sql, values = TASK.update(change.task_id, change.expect, change.set)
    history = None if change.history is None else _history_row(change.task_id, change.history)

    def step(db: Connection) -> Applied:
        db.execute(sql, values)
        if not db.changes():
            return _LOST
        if history is not None:
            _add_history(db, history)
        return _WON

    return step


def _change_execution(change: ChangeExecution) -> Step:
    sql, values = EXECUTION.update(change.execution_id, change.expect, change.set)

    def step(db: Connection) -> Applied:
        db.execute(sql, values)
        return _WON if db.changes() else _LOST

    return step


def _insert_task(change: InsertTask) -> Step:
    task = change.task
    row = TASK.row(task)
    script = None if change.script is None else SCRIPT.row(change.script)
    history = _history_row(task.id, change.history)
    labels = [(name, value, task.id) for name, value in task.labels.items()]

    def step(db: Connection) -> Applied:
        db.execute(_INSERT_TASK, row)
        if not db.changes():
            return _task_is_there(db, task.id, task.dedupe_key)
        if script is not None:
            db.execute(_INSERT_SCRIPT, script)
        if labels:
            db.executemany(_INSERT_LABEL, labels)
        _add_history(db, history)
        return _WON

    return step


def _task_is_there(db: Connection, task_id: str, dedupe_key: str | None) -> Applied:
    """The same id: an earlier call whose answer was lost has won. Else the key belongs to another task."""
    if fetch(db, _HAS_TASK, (task_id,)):
        return _WON
    return Applied(won=False, holder=fetch(db, _HOLDER_OF_KEY, (dedupe_key,))[0][0])


def _insert_execution(change: InsertExecution) -> Step:
    execution = change.execution
    row = EXECUTION.row(execution)

    def step(db: Connection) -> Applied:
        ((attempt, fence),) = fetch(db, _NUMBERS, (execution.task_id, execution.device_id))
        row[_ATTEMPT], row[_FENCE] = attempt, fence if execution.device_id is not None else None
        db.execute(_INSERT_EXECUTION, row)
        if db.changes():
            return Applied(won=True, attempt=attempt, fencing_token=row[_FENCE])
        return _execution_is_there(db, execution.id, execution.device_id)

    return step


def _execution_is_there(db: Connection, execution_id: str, device_id: str | None) -> Applied:
    """Ours already, with the numbers it was given. Else busy: both numbers were worked out in this transaction, so only
    the index on open rows can have refused it."""
    ours = fetch(db, _OURS_ALREADY, (execution_id,))
    if ours:
        return Applied(won=True, attempt=ours[0][0], fencing_token=ours[0][1])
    return Applied(won=False, holder=fetch(db, _HOLDER_OF_DEVICE, (device_id,))[0][0])


def _history_row(task_id: str, history: History) -> list[Any]:
    return [task_id, 0, *HISTORY.row(history)]


def _add_history(db: Connection, row: list[Any]) -> None:
    found = fetch(db, _LAST_HISTORY, (row[0],))
    last = found[0][0] if found else 0
    row[1] = last + 1
    db.execute(_INSERT_HISTORY, row)
    if last >= HISTORY_KEPT:
        db.execute(_TRIM_HISTORY, (row[0], row[1] - HISTORY_KEPT))


def append_lines(db: Connection, lines: Sequence[LogLine], rows: Sequence[list[Any]], limit: int) -> int:
    """`rows` are the lines as encoded. One update of the counters per execution."""
    counts: dict[str, list[int]] = {}  # execution -> lines there, stored now, dropped now
    for line, row in zip(lines, rows, strict=True):
        count = counts.get(line.execution_id)
        if count is None:
            there = fetch(db, _LINES_OF, (line.execution_id,))
            count = counts[line.execution_id] = [there[0][0] if there else 0, 0, 0]
        if count[0] >= limit:
            # A line that is delivered again is no dropped line.
            known = line.seq is not None and fetch(db, _HAS_LINE, (line.execution_id, line.seq))
            count[2] += not known
            continue
        db.execute(_INSERT_LINE, row)
        if db.changes():
            count[0] += 1
            count[1] += 1
    db.executemany(_COUNT_LINES, [(new, lost, id) for id, (_, new, lost) in counts.items() if new or lost])
    return sum(new for _, new, _ in counts.values())


# --------------------------------------------------------------------------------------------------------------- purge

_FINISHED_BEFORE: Final = "finished_at IS NOT NULL AND finished_at < ? AND status IN ('success', 'failed', 'canceled')"
_PURGEABLE: Final = (
    f"SELECT id FROM script_task INDEXED BY task_finished WHERE {_FINISHED_BEFORE} ORDER BY finished_at LIMIT ?"
)
_DELETE_LINES: Final = (
    "DELETE FROM task_exec_log WHERE cursor IN "
    "(SELECT cursor FROM task_exec_log INDEXED BY log_by_task WHERE task_id = ? ORDER BY cursor LIMIT ?)"
)
_DELETE_OLD_LINES: Final = (
    "DELETE FROM task_exec_log WHERE cursor IN (SELECT cursor FROM "
    "(SELECT cursor, stored_at FROM task_exec_log WHERE cursor > 0 ORDER BY cursor LIMIT ?) WHERE stored_at < ?)"
)
_LABELS_OF: Final = f"SELECT labels FROM script_task WHERE id = ? AND {_FINISHED_BEFORE}"
_IS_OPEN: Final = "SELECT 1 FROM task_execution INDEXED BY execution_attempt WHERE task_id = ? AND active = 1"
_FENCES_OF: Final = (
    "SELECT device_id, max(fencing_token) FROM task_execution INDEXED BY execution_attempt "
    "WHERE task_id = ? AND device_id IS NOT NULL GROUP BY device_id"
)
_DELETE_TASK: Final = (
    "DELETE FROM script_task WHERE id = ?",
    "DELETE FROM task_history WHERE task_id = ?",
    "DELETE FROM task_execution WHERE task_id = ? AND device_id IS NULL",
)
# Also a row that outlived its own task as its device's highest, and is that no longer. The highest of all stays, so
# that the next fence is above every one that was ever given.
_DELETE_ROWS_BELOW: Final = (
    "DELETE FROM task_execution WHERE device_id = ?1 AND device_id IS NOT NULL AND fencing_token <= ?2 AND active = 0 "
    "AND fencing_token < (SELECT max(fencing_token) FROM task_execution WHERE device_id = ?1 AND device_id IS NOT NULL) "
    "AND NOT EXISTS (SELECT 1 FROM script_task WHERE id = task_execution.task_id)"
)


def purgeable(db: Connection, before: datetime, limit: int) -> list[str]:
    return [id for (id,) in fetch(db, _PURGEABLE, (to_ms(before), limit))]


def delete_lines(db: Connection, task_id: str, limit: int) -> int:
    db.execute(_DELETE_LINES, (task_id, limit))
    return db.changes()


def delete_old_lines(db: Connection, before: datetime, limit: int) -> int:
    """By time of arrival, so it stops at the first line that is young enough."""
    db.execute(_DELETE_OLD_LINES, (limit, to_ms(before)))
    return db.changes()


def delete_task(db: Connection, task_id: str, before: datetime) -> int:
    """1 if it was removed; 0 if it is not final any more, or an execution of it is still open."""
    found = fetch(db, _LABELS_OF, (task_id, to_ms(before)))
    if not found or fetch(db, _IS_OPEN, (task_id,)):
        return 0
    labels = TASK.decode_one("labels", found[0][0])
    fences = fetch(db, _FENCES_OF, (task_id,))
    db.executemany("DELETE FROM task_label WHERE name = ? AND value = ? AND task_id = ?",
                   [(name, value, task_id) for name, value in labels.items()])  # fmt: skip
    for statement in _DELETE_TASK:
        db.execute(statement, (task_id,))
    db.executemany(_DELETE_ROWS_BELOW, fences)
    return 1
