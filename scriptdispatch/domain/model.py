"""The records of the product, in the words of the API. Immutable; a change is a value made in `lifecycle`.

Times are aware UTC, cut to milliseconds. `Task.status` moves only along `lifecycle.TRANSITIONS`.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct, field

Status = Literal["waiting", "running", "send_success", "failed_waiting_retry", "paused", "success", "failed", "canceled"]
WAITING: Final = "waiting"
RUNNING: Final = "running"
SENT: Final = "send_success"
RETRY: Final = "failed_waiting_retry"
PAUSED: Final = "paused"
SUCCESS: Final = "success"
FAILED: Final = "failed"
CANCELED: Final = "canceled"
STATUSES: Final[tuple[Status, ...]] = (WAITING, RUNNING, SENT, RETRY, PAUSED, SUCCESS, FAILED, CANCELED)
FINAL: Final[frozenset[Status]] = frozenset((SUCCESS, FAILED, CANCELED))
EXECUTABLE: Final[frozenset[Status]] = frozenset((WAITING, RETRY))
UNDER_WAY: Final[frozenset[Status]] = frozenset((RUNNING, SENT))

ExecutionStatus = Literal["running", "success", "failed", "canceled"]
Push = Literal["not_sent", "sent", "unknown", "refused"]
# How an execution row was closed (PROTOCOL K1). None while it is open.
Outcome = Literal["success", "failed", "refused", "timeout", "released", "dropped", "canceled", "handed_back"]
Priority = Literal["low", "normal", "high"]
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
Language = Literal["shell", "python"]
Strategy = Literal["fixed", "exponential", "fixed_then_exponential", "daily", "forever"]
HistoryKind = Literal["STATE_CHANGE", "RETRY", "ERROR", "INFO"]
MessageType = Literal["LOG", "PROGRESS", "SUCCESS", "FAILURE", "CANCELED"]

ERROR_CODES: Final = (
    "DEVICE_BUSY", "DEVICE_NOT_FOUND", "DISPATCH_FAILED", "EXECUTION_FAILED", "TIMEOUT", "SYSTEM_ERROR",
    "INTERNAL_ERROR", "DEPENDENCY_FAILED", "CHILD_FAILED", "LOCK_RELEASED", "OVERRIDDEN", "CANCELED",
)  # fmt: skip


class Error(Struct, frozen=True, kw_only=True):
    """What went wrong with a task or execution; `code` is one of ERROR_CODES, `message` a sentence for people."""

    code: str
    message: str
    details: dict[str, Any] = {}


class Retry(Struct, frozen=True, kw_only=True):
    strategy: Strategy = "fixed"
    max_retries: int = 3
    delay_seconds: float = 10.0
    backoff_rate: float = 2.0
    max_delay_seconds: float = 3600.0
    per_day: int = 3
    jitter: bool = True


class Script(Struct, frozen=True, kw_only=True):
    """Code that tasks carry, stored once: `id` is derived from language and content, `sha256` is of the content."""

    id: str
    language: str
    content: str
    sha256: str
    created_at: datetime


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    name: str
    type: str = "script"
    device_id: str | None = None
    script_id: str | None = None
    params: dict[str, Any] | None = None
    secret_params: list[str] = []
    priority: Priority = "normal"
    run_at: datetime | None = None
    timeout_seconds: int = 1800
    retry: Retry = Retry()
    dedupe_key: str | None = None
    labels: dict[str, str] = {}

    status: Status = WAITING
    lane_key: str  # see domain.lanes: the one sortable key of the task's place
    next_run_at: datetime | None  # when it may next start; None once it is under way or final
    queued: bool = False  # pushed to the ready queue, as far as the writer of this row knew
    wait_code: str | None = None  # why next_run_at lies ahead: central control asked ("central"), or is "central_away"
    progress: int = 0
    step: str | None = None
    result: Any = None
    error: Error | None = None
    retry_count: int = 0
    attempt: int = 0
    round: int = 1
    push: Push | None = None
    execution_id: str | None = None
    cancel_requested: bool = False
    cancel_requested_at: datetime | None = None
    cancel_reason: str | None = None  # in the user's words
    cancel_answer: str | None = None  # what central control said to it; it is asked until it answers
    late_success_of: str | None = None
    first_failed_at: datetime | None = None  # of this round; `daily` counts its days from here
    worker_id: str | None = None
    node_id: str | None = None
    created_by: str | None = None
    created_at: datetime
    updated_at: datetime
    first_started_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Execution(Struct, frozen=True, kw_only=True):
    """One attempt at a task: the frozen snapshot, and the row on which every outcome is decided, once (PROTOCOL K1)."""

    id: str
    task_id: str
    round: int
    attempt: int = 0  # given by the store at W3
    device_id: str | None
    fencing_token: int | None = None  # given by the store at W3
    active: bool = True
    status: ExecutionStatus = "running"
    push: Push = "not_sent"
    outcome: Outcome | None = None
    script_id: str | None
    script_sha256: str | None = None  # of the rendered text
    params: dict[str, Any] | None = None
    timeout_seconds: int
    worker_id: str
    node_id: str
    # What W4 found, so that a hand-back can restore it.
    from_status: Status
    previous_execution_id: str | None
    previous_push: Push | None = None
    created_at: datetime
    sending_at: datetime | None = None
    sent_by: str | None = None
    answered_at: datetime | None = None  # the push was over, taken or unclear
    sent_at: datetime | None = None  # taken by central control
    deadline_at: datetime | None = None
    finished_at: datetime | None = None
    wait_ms: int | None = None
    exit_code: int | None = None
    result: Any = None
    error: Error | None = None
    retryable: bool = True  # a message may say that a failure is not worth a retry
    retry_at: datetime | None = None  # central control asked to wait until then (handed back only)
    late_success: bool = False
    late_result: str | None = None  # first terminal message that came after the row was closed otherwise
    closed_by: str | None = None
    reason: str | None = None
    log_lines: int = 0
    log_dropped: int = 0

    # Made from the times instead of stored: so the changes of many executions are alike and go to the store together.

    @property
    def push_ms(self) -> int | None:
        return self._phases[0]

    @property
    def run_ms(self) -> int | None:
        return self._phases[1]

    @property
    def _phases(self) -> tuple[int | None, int | None]:
        return phases_ms(self.push, self.sending_at, self.answered_at, self.sent_at, self.finished_at)


def phases_ms(
    push: Push,
    sending_at: datetime | None,
    answered_at: datetime | None,
    sent_at: datetime | None,
    finished_at: datetime | None,
) -> tuple[int | None, int | None]:
    """(push_ms, run_ms). What was certainly not taken did not run: its push lasted until the row was closed."""
    if push in ("not_sent", "refused"):
        return span_ms(sending_at, finished_at), None
    return span_ms(sending_at, answered_at), span_ms(sent_at or sending_at, finished_at)


def span_ms(start: datetime | None, end: datetime | None) -> int | None:
    """A result may overtake the record of its push: then nothing, not less."""
    if start is None or end is None:
        return None
    return max(0, int((end - start).total_seconds() * 1000))


class History(Struct, frozen=True, kw_only=True, rename={"from_status": "from", "to_status": "to"}):
    at: datetime
    kind: HistoryKind
    from_status: Status | None = None
    to_status: Status | None = None
    actor: str
    reason: str
    worker_id: str | None = None
    execution_id: str | None = None
    retry_count: int = 0
    error: Error | None = None


class LogLine(Struct, frozen=True, kw_only=True):
    task_id: str
    execution_id: str
    seq: int | None
    time: datetime
    stream: str
    content: str
    late: bool = False
    truncated: bool = False


class StoredLine(Struct, frozen=True, kw_only=True):
    """A log line with its place in the task's order of arrival."""

    cursor: int
    line: LogLine


class Message(Struct, frozen=True, kw_only=True):
    """An execution-log message of central control (SPEC 6), as parsed. Unknown fields are ignored."""

    execution_id: str
    task_id: str
    type: MessageType
    device_id: str | None = None
    seq: int | None = None
    time: datetime | None = None
    stream: str = "stdout"
    content: str | None = None
    progress: float | None = None
    step: str | None = None
    exit_code: int | None = None
    result: Any = None
    error: dict[str, Any] | None = None
    retryable: bool = True
    signature: str | None = None


class Quarantined(Struct, frozen=True, kw_only=True):
    id: str
    at: datetime
    reason: str  # a word for programs: not_json, invalid, unknown_execution, wrong_device, ...
    detail: str
    body: bytes


class Token(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    hash: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class WorkerRecord(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    node_id: str
    pid: int
    status: Literal["starting", "ready", "stopping", "offline"]
    capacity: int
    load: int
    task_types: list[str] | None
    last_heartbeat_at: datetime
    started_at: datetime
    restarts: int = 0


class NodeRecord(Struct, frozen=True, kw_only=True):
    """What a master says of itself with each heartbeat: all that `/nodes`, `/workers` and `/metrics` show of it."""

    id: str
    name: str
    pid: int
    version: str
    started_at: datetime
    last_heartbeat_at: datetime
    workers: list[WorkerRecord] = []
    consumers: int = 0
    consumer_lag: int | None = None
    problems: list[str] = []  # e.g. workers that cannot be started; shown by /readyz and doctor
    metrics: dict[str, Any] = field(default_factory=dict)


class Breaker(Struct, frozen=True, kw_only=True):
    """The cluster's view of central control. While `open`, nothing is handed out or charged."""

    open: bool = False
    since: datetime | None = None
    reason: str | None = None
    probe_at: datetime | None = None


def mask_params(task: Task) -> Mapping[str, Any] | None:
    """The params as anybody may see them."""
    if task.params is None or not task.secret_params:
        return task.params
    return {name: "***" if name in task.secret_params else value for name, value in task.params.items()}
