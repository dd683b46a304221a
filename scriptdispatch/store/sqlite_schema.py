"""The tables and indexes of the store. Every statement may be repeated: each process that opens the file runs them.

An index on what changes often costs every task, so those are few and partial. What never changes after the insert
(device, type, priority, labels) may have its own.
"""

from typing import Final

from scriptdispatch.domain.model import STATUSES
from scriptdispatch.sqlite import Connection
from scriptdispatch.store.sqlite_rows import EXECUTION, HISTORY, LOG, QUARANTINE, REMEMBERED, SCRIPT, TASK, TOKEN

EXECUTABLE_NOW: Final = "status IN ('waiting', 'failed_waiting_retry')"
UNDER_WAY_NOW: Final = "status IN ('running', 'send_success')"
QUARANTINE_TALLY: Final = "quarantine"


def _key(ddl: str) -> str:
    return ddl.replace("id TEXT", "id TEXT NOT NULL PRIMARY KEY", 1)


_TABLES: Final = (
    f"CREATE TABLE IF NOT EXISTS script_task ({_key(TASK.ddl)}, "
    "error_code TEXT GENERATED ALWAYS AS (json_extract(error, '$.code')) VIRTUAL)",
    f"CREATE TABLE IF NOT EXISTS script_code ({_key(SCRIPT.ddl)})",
    f"CREATE TABLE IF NOT EXISTS task_execution ({_key(EXECUTION.ddl)})",
    # AUTOINCREMENT: a cursor is never given twice, also when the newest lines have been purged.
    f"CREATE TABLE IF NOT EXISTS task_exec_log (cursor INTEGER PRIMARY KEY AUTOINCREMENT, stored_at INTEGER, {LOG.ddl})",
    f"CREATE TABLE IF NOT EXISTS task_history (task_id TEXT NOT NULL, n INTEGER NOT NULL, {HISTORY.ddl}, "
    "PRIMARY KEY (task_id, n)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS task_label (name TEXT NOT NULL, value TEXT NOT NULL, task_id TEXT NOT NULL, "
    "PRIMARY KEY (name, value, task_id)) WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS quarantine ({_key(QUARANTINE.ddl)})",
    f"CREATE TABLE IF NOT EXISTS idempotency (owner TEXT NOT NULL, key TEXT NOT NULL, {REMEMBERED.ddl}, "
    "PRIMARY KEY (owner, key)) WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS token ({_key(TOKEN.ddl)})",
    "CREATE TABLE IF NOT EXISTS meta (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    # Counted as they change: counting a million rows for every look at the overview would take too long.
    "CREATE TABLE IF NOT EXISTS tally (name TEXT NOT NULL PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
)

_INDEXES: Final = (
    "CREATE UNIQUE INDEX IF NOT EXISTS task_dedupe ON script_task (dedupe_key) WHERE dedupe_key IS NOT NULL",
    f"CREATE INDEX IF NOT EXISTS task_due ON script_task (next_run_at, id) WHERE {EXECUTABLE_NOW}",
    "CREATE INDEX IF NOT EXISTS task_by_status ON script_task (status, id)",
    "CREATE INDEX IF NOT EXISTS task_to_cancel ON script_task (cancel_requested_at, id) "
    f"WHERE cancel_requested = 1 AND {UNDER_WAY_NOW}",
    "CREATE INDEX IF NOT EXISTS task_finished ON script_task (finished_at, status, error_code) "
    "WHERE finished_at IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS task_by_error ON script_task (error_code, id) WHERE error_code IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS task_by_device ON script_task (device_id, id) WHERE device_id IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS task_by_type ON script_task (type, id)",
    "CREATE INDEX IF NOT EXISTS task_by_priority ON script_task (priority, id)",
    "CREATE INDEX IF NOT EXISTS task_by_tail ON script_task (substr(id, -8))",
    # The wall (PROTOCOL, "Unique"): one open row per device, fences and attempts given once.
    "CREATE UNIQUE INDEX IF NOT EXISTS execution_active ON task_execution (device_id) "
    "WHERE active = 1 AND device_id IS NOT NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS execution_fence ON task_execution (device_id, fencing_token) "
    "WHERE device_id IS NOT NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS execution_attempt ON task_execution (task_id, attempt)",
    "CREATE INDEX IF NOT EXISTS execution_open ON task_execution (id) WHERE active = 1",
    "CREATE INDEX IF NOT EXISTS execution_deadline ON task_execution (deadline_at, id) "
    "WHERE active = 1 AND deadline_at IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS execution_closed ON task_execution (finished_at, id) WHERE finished_at IS NOT NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS log_once ON task_exec_log (execution_id, seq) WHERE seq IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS log_by_task ON task_exec_log (task_id, cursor)",
    "CREATE INDEX IF NOT EXISTS idempotency_age ON idempotency (begun_at)",
)

_TRIGGERS: Final = (
    "CREATE TRIGGER IF NOT EXISTS task_counted AFTER INSERT ON script_task BEGIN "
    "UPDATE tally SET n = n + 1 WHERE name = new.status; END",
    "CREATE TRIGGER IF NOT EXISTS task_moved AFTER UPDATE OF status ON script_task WHEN old.status <> new.status BEGIN "
    "UPDATE tally SET n = n - 1 WHERE name = old.status; UPDATE tally SET n = n + 1 WHERE name = new.status; END",
    "CREATE TRIGGER IF NOT EXISTS task_gone AFTER DELETE ON script_task BEGIN "
    "UPDATE tally SET n = n - 1 WHERE name = old.status; END",
    "CREATE TRIGGER IF NOT EXISTS quarantine_counted AFTER INSERT ON quarantine BEGIN "
    f"UPDATE tally SET n = n + 1 WHERE name = '{QUARANTINE_TALLY}'; END",
    "CREATE TRIGGER IF NOT EXISTS quarantine_gone AFTER DELETE ON quarantine BEGIN "
    f"UPDATE tally SET n = n - 1 WHERE name = '{QUARANTINE_TALLY}'; END",
)

_SEEDS: Final = tuple(f"INSERT OR IGNORE INTO tally VALUES ('{name}', 0)" for name in (*STATUSES, QUARANTINE_TALLY))

_REST: Final = (*_INDEXES, *_TRIGGERS, *_SEEDS, "INSERT OR IGNORE INTO meta VALUES ('schema', 1)")


def create(db: Connection) -> None:
    """Makes what is missing, in a new file or in one of an older version: tables, then columns, then what needs them."""
    for statement in _TABLES:
        db.execute(statement)
    for table in (TASK, SCRIPT, EXECUTION, HISTORY, LOG, QUARANTINE, REMEMBERED, TOKEN):
        there = {row[1] for row in db.execute(f"PRAGMA table_xinfo({table.name})").fetchall()}
        for column in table.columns:
            if column not in there:
                db.execute(f"ALTER TABLE {table.name} ADD COLUMN {table.addition(column)}")
    for statement in _REST:
        db.execute(statement)
