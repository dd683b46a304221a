"""How tasks look in a list and on their own."""

from datetime import datetime
from typing import Any

from scriptdispatch.cli.screen import Cell, Column, Screen
from scriptdispatch.cli.signs import clean, look
from scriptdispatch.cli.times import age, read, short_span, shown, span_ms
from scriptdispatch.domain.waiting import ordinal

COLUMNS = [
    Column("ID"),
    Column("STATE"),
    Column("DEVICE"),
    Column("WHY", flexible=True),
    Column("PRIO"),
    Column("AGE", right=True),
    Column("NAME", flexible=True),
]


def row(task: dict[str, Any], now: datetime) -> list[Cell]:
    sign, word, style = look(task["status"], task.get("push"))
    return [
        Cell(task["id"][-8:], task["id"]),
        Cell(f"{sign} {word}", task["status"], style),
        Cell(clean(task.get("device_id") or "–"), task.get("device_id")),
        Cell(short_why(task, now), long_why(task)),
        Cell(clean(task.get("priority")), task.get("priority")),
        Cell(age(task.get("created_at"), now), task.get("created_at")),
        Cell(clean(task.get("name")), task.get("name")),
    ]


def short_why(task: dict[str, Any], now: datetime) -> str:
    """Why it is not moving, or what went wrong, for a column."""
    waiting = task.get("waiting_for")
    if not waiting:
        return clean((task.get("error") or {}).get("code") or "")
    if waiting.get("reason") == "device" and waiting.get("task_id"):
        since = read((waiting.get("details") or {}).get("holder_since"))
        span = f" ({short_span((now - since).total_seconds())})" if since else ""
        return f"{ordinal(waiting.get('position') or 1)} in lane; …{waiting['task_id'][-8:]}{span}"
    return clean(waiting.get("message") or waiting.get("reason")).rstrip(".")


def long_why(task: dict[str, Any]) -> str:
    waiting, error = task.get("waiting_for"), task.get("error")
    if waiting:
        return str(waiting.get("message") or waiting.get("reason"))
    return f"{error.get('code')}: {error.get('message')}" if error else ""


def show(screen: Screen, task: dict[str, Any], executions: list[dict[str, Any]]) -> None:
    """The page of one task: what, why, the attempts, what to do next."""
    state, style = screen.state(task["status"], task.get("push"))
    device = f"   {clean(task['device_id'])}" if task.get("device_id") else ""
    screen.parts((clean(task["name"]), "bold"), (f"   {state}", style), (f"{device}   {task['id']}", ""))
    for title, text in _facts(task, screen):
        screen.line(f"{title:<8} {text}")
    _attempts(screen, executions)
    screen.line(f"{'Next':<8} {_next(task)}")


def _facts(task: dict[str, Any], screen: Screen) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    waiting, error = task.get("waiting_for"), task.get("error")
    if waiting:
        facts.append(("Why", clean(waiting.get("message") or waiting.get("reason")).rstrip(".")))
    if error:
        facts.append(("Error", f"{clean(error.get('code'))}: {clean(error.get('message'))}"))
    if task.get("progress") and task["status"] in ("running", "send_success"):
        facts.append(("Progress", f"{task['progress']} %" + (f" {clean(task['step'])}" if task.get("step") else "")))
    if task.get("result") is not None:
        facts.append(("Result", clean(task["result"])))
    if task.get("params"):
        facts.append(("Params", clean(" ".join(f"{name}={value}" for name, value in task["params"].items()))))
    if task.get("labels"):
        facts.append(("Labels", clean(" ".join(f"{name}={value}" for name, value in task["labels"].items()))))
    by = f" by {clean(task['created_by'])}" if task.get("created_by") else ""
    facts.append(("Created", shown(task.get("created_at"), utc=screen.utc) + by + f", priority {task.get('priority')}"))
    if task.get("finished_at"):
        facts.append(("Finished", shown(task["finished_at"], utc=screen.utc)))
    return facts


def _attempts(screen: Screen, executions: list[dict[str, Any]]) -> None:
    title = "Attempts"
    for one in executions:
        sign, style = _execution_sign(one)
        code = clean((one.get("error") or {}).get("code") or ("" if one["status"] == "running" else one["status"]))
        clocks = " ".join(f"{name} {span_ms(one.get(f'{name}_ms'))}" for name in ("wait", "push", "run"))
        ended = f"  exit {one['exit_code']}" if one.get("exit_code") is not None else ""
        screen.parts((f"{title:<8} {one['attempt']} ", ""), (sign, style), (f" {code or '…':<18} {clocks}{ended}", ""))
        title = ""


def _execution_sign(execution: dict[str, Any]) -> tuple[str, str]:
    status = {"running": "send_success" if execution.get("sent_at") else "running"}.get(
        execution["status"], execution["status"]
    )
    sign, _, style = look(status, execution.get("push"))
    return sign, style


def _next(task: dict[str, Any]) -> str:
    short = task["id"][-8:]
    if task["status"] in ("success", "failed", "canceled"):
        return f"task logs {short}"
    return f"task logs -f {short} · task cancel {short}"
