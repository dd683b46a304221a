"""Records as the API shows them (SPEC 4.2): plain dicts, times in UTC with milliseconds, secrets masked. Pure."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from scriptdispatch.domain.model import (
    Error,
    Execution,
    History,
    NodeRecord,
    Quarantined,
    Retry,
    Script,
    StoredLine,
    Task,
    Token,
    WorkerRecord,
    mask_params,
)
from scriptdispatch.domain.render import as_text
from scriptdispatch.domain.waiting import WaitingFor
from scriptdispatch.services.fields import format_time

MASK = "***"
SHORTEST_SECRET = 4  # a shorter one is masked in params only: it would tear holes into any text
Masked = Callable[[Any], Any]


def masker(task: Task) -> Masked:
    """A function that takes the task's secrets out of any text or JSON: output, errors and results may quote them."""
    params = task.params or {}
    texts = (as_text(params[name]) for name in task.secret_params if name in params)
    secrets = sorted((text for text in texts if len(text) >= SHORTEST_SECRET), key=len, reverse=True)
    if not secrets:
        return lambda value: value

    def masked(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, MASK)
            return value
        if isinstance(value, dict):
            return {masked(key): masked(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [masked(inner) for inner in value]
        return value

    return masked


def task_view(task: Task, waiting: WaitingFor | None, script: Script | None = None) -> dict[str, Any]:
    """`script` is given for a single task only: lists go without content."""
    clean = masker(task)
    view: dict[str, Any] = {
        "id": task.id,
        "name": task.name,
        "type": task.type,
        "device_id": task.device_id,
        "script_id": task.script_id,
        "params": mask_params(task),
        "secret_params": task.secret_params,
        "priority": task.priority,
        "run_at": format_time(task.run_at),
        "timeout_seconds": task.timeout_seconds,
        "retry": retry_view(task.retry),
        "dedupe_key": task.dedupe_key,
        "labels": task.labels,
        "status": task.status,
        "progress": task.progress,
        "step": clean(task.step),
        "result": clean(task.result),
        "error": clean(error_view(task.error)),
        "retry_count": task.retry_count,
        "attempt": task.attempt,
        "round": task.round,
        "push": task.push,
        "queued": task.queued,
        "next_run_at": format_time(task.next_run_at),
        "waiting_for": waiting_view(waiting),
        "cancel_requested": task.cancel_requested,
        "execution_id": task.execution_id,
        "worker_id": task.worker_id,
        "node_id": task.node_id,
        "created_by": task.created_by,
        "created_at": format_time(task.created_at),
        "updated_at": format_time(task.updated_at),
        "first_started_at": format_time(task.first_started_at),
        "started_at": format_time(task.started_at),
        "finished_at": format_time(task.finished_at),
    }
    if script is not None:
        view["script"] = script_view(script)
    return view


def script_view(script: Script) -> dict[str, Any]:
    return {"language": script.language, "content": script.content, "sha256": script.sha256}


def retry_view(retry: Retry) -> dict[str, Any]:
    return {field: getattr(retry, field) for field in retry.__struct_fields__}


def error_view(error: Error | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.code, "message": error.message, "details": error.details}


def waiting_view(waiting: WaitingFor | None) -> dict[str, Any] | None:
    if waiting is None:
        return None
    return {
        "reason": waiting.reason,
        "message": waiting.message,
        "since": format_time(waiting.since),
        "until": format_time(waiting.until),
        "task_id": waiting.task_id,
        "position": waiting.position,
        "details": timeless(waiting.details),
    }


def execution_view(row: Execution, clean: Masked) -> dict[str, Any]:
    return {
        "id": row.id,
        "task_id": row.task_id,
        "attempt": row.attempt,
        "round": row.round,
        "status": row.status,
        "device_id": row.device_id,
        "fencing_token": row.fencing_token,
        "worker_id": row.worker_id,
        "node_id": row.node_id,
        "push": row.push,
        "script_sha256": row.script_sha256,
        "created_at": format_time(row.created_at),
        "sent_at": format_time(row.sent_at),
        "finished_at": format_time(row.finished_at),
        "wait_ms": row.wait_ms,
        "push_ms": row.push_ms,
        "run_ms": row.run_ms,
        "exit_code": row.exit_code,
        "result": clean(row.result),
        "error": clean(error_view(row.error)),
        "outcome": row.outcome,
        "deadline_at": format_time(row.deadline_at),
    }


def history_view(row: History, clean: Masked) -> dict[str, Any]:
    return {
        "at": format_time(row.at),
        "kind": row.kind,
        "from": row.from_status,
        "to": row.to_status,
        "actor": row.actor,
        "reason": clean(row.reason),
        "worker_id": row.worker_id,
        "execution_id": row.execution_id,
        "retry_count": row.retry_count,
        "error": clean(error_view(row.error)),
    }


def line_view(stored: StoredLine, clean: Masked) -> dict[str, Any]:
    line = stored.line
    return {
        "cursor": str(stored.cursor),
        "execution_id": line.execution_id,
        "seq": line.seq,
        "time": format_time(line.time),
        "stream": line.stream,
        "content": clean(line.content),
        "late": line.late,
        "truncated": line.truncated,
    }


def worker_view(worker: WorkerRecord, *, alive: bool) -> dict[str, Any]:
    """A worker of a node that is silent is offline, whatever its last word was."""
    return {
        "id": worker.id,
        "name": worker.name,
        "node_id": worker.node_id,
        "pid": worker.pid,
        "status": worker.status if alive else "offline",
        "capacity": worker.capacity,
        "load": worker.load,
        "task_types": worker.task_types,
        "last_heartbeat_at": format_time(worker.last_heartbeat_at),
        "started_at": format_time(worker.started_at),
        "restarts": worker.restarts,
    }


def node_view(node: NodeRecord, *, alive: bool, leader: tuple[str, int] | None, breaker: str) -> dict[str, Any]:
    leads = leader is not None and leader[0] == node.id
    return {
        "id": node.id,
        "name": node.name,
        "pid": node.pid,
        "status": "alive" if alive else "offline",
        "leader": leads,
        "term": leader[1] if leader is not None and leads else None,
        "version": node.version,
        "started_at": format_time(node.started_at),
        "last_heartbeat_at": format_time(node.last_heartbeat_at),
        "workers": len(node.workers) if alive else 0,  # they end with their master
        "consumers": node.consumers,
        "consumer_lag": node.consumer_lag,
        "breaker": breaker,
        "problems": node.problems,
    }


def quarantine_view(item: Quarantined) -> dict[str, Any]:
    """`body` as text; what is no text is shown with \\x escapes. `size` is that of the raw bytes."""
    return {
        "id": item.id,
        "at": format_time(item.at),
        "reason": item.reason,
        "detail": item.detail,
        "body": item.body[: 64 * 1024].decode(errors="backslashreplace"),
        "size": len(item.body),
    }


def token_view(token: Token) -> dict[str, Any]:
    """Never the hash."""
    return {
        "id": token.id,
        "name": token.name,
        "scopes": token.scopes,
        "created_at": format_time(token.created_at),
        "expires_at": format_time(token.expires_at),
        "revoked_at": format_time(token.revoked_at),
    }


def timeless(value: Any) -> Any:
    """JSON with its times as the API writes them."""
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [timeless(inner) for inner in value]
    return value
