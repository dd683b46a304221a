"""`task create|batch|list|show|logs|cancel`."""

from datetime import timedelta
from typing import Annotated, Any

import typer

from scriptdispatch.cli import complete, pages, task_body
from scriptdispatch.cli.confirm import Yes, confirm
from scriptdispatch.cli.screen import Screen
from scriptdispatch.cli.session import Session, command, wrong
from scriptdispatch.cli.signs import LOOKS, STATUS_WORDS, clean
from scriptdispatch.cli.task_batch import batch
from scriptdispatch.cli.times import parse_span, read, shown
from scriptdispatch.clock import SystemClock

app = typer.Typer(no_args_is_help=True)
TaskId = Annotated[
    str, typer.Argument(metavar="ID", help="The id, or the last 8 characters of it.", autocompletion=complete.tasks)
]
Timeout = Annotated[str | None, typer.Option("--timeout", help="Watch no longer than this (90s, 5m): exit 124.")]
_RETRY = "Retries"
_WATCH = "Watching"
command(app, "batch")(batch)


@command(app, "create")
def create(
    session: Session,
    device: Annotated[
        str | None, typer.Option("--device", "-d", help="The device to run on.", autocompletion=complete.devices)
    ] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="The script's file; - for stdin.")] = None,
    script_text: Annotated[str | None, typer.Option("--script-text", help="The script itself.")] = None,
    language: Annotated[str | None, typer.Option("--language", help="shell or python; from the file unless given.")] = None,
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="NAME=TEXT, or NAME:=JSON.")] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", help="A param that is never shown.")] = None,
    at: Annotated[str | None, typer.Option("--at", help="When: a time, or +5m. Now unless given.")] = None,
    priority: Annotated[str | None, typer.Option("--priority", help="low, normal or high.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="A name for people; the file's unless given.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="NAME=VALUE; repeatable.")] = None,
    timeout_seconds: Annotated[int | None, typer.Option("--timeout-seconds", help="How long it may run.")] = None,
    dedupe_key: Annotated[str | None, typer.Option("--dedupe-key", help="Refused if a task has this key.")] = None,
    idempotency_key: Annotated[str | None, typer.Option("--idempotency-key", help="The same again: no 2nd task.")] = None,
    max_retries: Annotated[int | None, typer.Option("--max-retries", rich_help_panel=_RETRY)] = None,
    retry_strategy: Annotated[str | None, typer.Option("--retry-strategy", rich_help_panel=_RETRY)] = None,
    retry_delay: Annotated[str | None, typer.Option("--retry-delay", help="E.g. 10s.", rich_help_panel=_RETRY)] = None,
    backoff_rate: Annotated[float | None, typer.Option("--backoff-rate", rich_help_panel=_RETRY)] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Until it is final.", rich_help_panel=_WATCH)] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show its output, too.", rich_help_panel=_WATCH)] = False,
    timeout: Timeout = None,
) -> None:
    """Run a script on a device, now or at a given time.

    With --wait or --follow the exit code tells how it ended: 0 for success, 1 for failed or canceled.
    """
    script, its_name = task_body.script(file, script_text, language)
    values, hidden = task_body.params(param, secret)
    retry = {
        "strategy": retry_strategy,
        "max_retries": max_retries,
        "delay_seconds": span("--retry-delay", retry_delay),
        "backoff_rate": backoff_rate,
    }
    body = {
        "name": name or its_name,
        "device_id": device,
        "script": script,
        "params": values,
        "secret_params": hidden,
        "priority": priority,
        "run_at": task_body.run_at(at),
        "timeout_seconds": timeout_seconds,
        "retry": task_body.without_none(retry),
        "dedupe_key": dedupe_key,
        "labels": task_body.labels(label),
    }
    limit = span("--timeout", timeout)
    task = session.client.create(task_body.without_none(body), idempotency_key=idempotency_key)
    _created(session, task, watched=wait or follow)
    if wait or follow:
        _watch(session, task, follow=follow, timeout=limit)


@command(app, "list")
def list_tasks(
    session: Session,
    status: Annotated[
        str | None, typer.Option("--status", help=f"Comma list of {', '.join(LOOKS)}.", autocompletion=complete.states)
    ] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", autocompletion=complete.devices)] = None,
    priority: Annotated[str | None, typer.Option("--priority")] = None,
    type: Annotated[str | None, typer.Option("--type")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", "-l", help="NAME=VALUE; repeatable.")] = None,
    error_code: Annotated[str | None, typer.Option("--error-code", help="E.g. TIMEOUT.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Created within this span, e.g. 2h.")] = None,
    limit: pages.Limit = 50,
    cursor: pages.Cursor = None,
    every: pages.Every = False,
) -> None:
    """Tasks, newest first, each with why it is not moving."""
    from scriptdispatch.cli import task_views

    span_s = span("--since", since)
    query = {
        "status": _statuses(status),
        "device_id": device,
        "priority": priority,
        "type": type,
        "label": [":".join(task_body.pair_of("--label", one)) for one in label or ()],
        "error_code": error_code,
        "created_after": None if span_s is None else (SystemClock().now() - timedelta(seconds=span_s)).isoformat(),
        "limit": pages.LARGEST if every else limit,
    }
    page = pages.read(lambda place: session.client.tasks(**query, cursor=place), cursor, every)
    if session.screen.json:
        session.screen.document(page)
        return
    now = SystemClock().now()
    rows = [task_views.row(task, now) for task in page["items"]]
    empty = "No task matches." if any(value for key, value in query.items() if key != "limit") else _NO_TASKS
    session.screen.table(task_views.COLUMNS, rows, empty=empty)
    pages.note(session.screen, page)


@command(app, "show")
def show(
    session: Session,
    id: TaskId,
    history: Annotated[bool, typer.Option("--history", help="All that happened to it, too.")] = False,
) -> None:
    """One task: its state and why, its attempts, what to do next."""
    from scriptdispatch.cli import task_views
    from scriptdispatch.client import task_ref

    task = session.client.get(task_ref(id))
    if session.screen.json:
        session.screen.document({**task, "history": session.client.history(task["id"])} if history else task)
        return
    task_views.show(session.screen, task, session.client.executions(task["id"]))
    if history:
        for row in session.client.history(task["id"]):
            session.screen.line(_history_line(session.screen, row))


@command(app, "logs")
def logs(
    session: Session,
    id: TaskId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task is final.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=1, help="Only the last lines.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Only lines of this span, e.g. 5m.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Only those of one attempt.")] = None,
    stream: Annotated[str | None, typer.Option("--stream", help="stdout or stderr.")] = None,
    times: Annotated[bool, typer.Option("--times", "-t", help="With the time of each line.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="As it came: escape codes, too.")] = False,
    timeout: Timeout = None,
) -> None:
    """A task's output over all its attempts."""
    from scriptdispatch.cli.follow import RECONNECTED, Printer

    task = session.task_id(id)
    oldest_s = span("--since", since)
    limit = span("--timeout", timeout)
    oldest = None if oldest_s is None else SystemClock().now() - timedelta(seconds=oldest_s)
    query = {"execution_id": _execution(session, task, attempt), "stream": stream}
    printer = Printer(session, times=times, raw=raw, states=False)
    try:
        lines = session.client.logs(
            task, follow=follow, tail=tail, timeout=limit, on_reconnect=lambda: printer.say(RECONNECTED), **query
        )
        for line in lines:
            at = read(line.get("time"))
            if oldest is None or at is None or at >= oldest:
                printer.log(line)
    except KeyboardInterrupt:
        if follow:
            session.screen.note(f"Interrupted; task {task[-8:]} goes on.")
        raise typer.Exit(130) from None


@command(app, "cancel")
def cancel(
    session: Session,
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Ids, or the last 8 characters of them.", autocompletion=complete.tasks),
    ],
    reason: Annotated[str | None, typer.Option("--reason", help="Why; kept in the history.")] = None,
    force: Annotated[bool, typer.Option("--force", help="End it now, whatever the device does.")] = False,
    yes: Yes = False,
) -> None:
    """Cancel tasks. One that is on its device already may still finish, unless --force is given."""
    if force:
        what = f"task {clean(ids[0])}" if len(ids) == 1 else f"{len(ids)} tasks"
        confirm(f"End {what} now? A script that runs goes on, and its device is free for the next one.", yes)
    for given in ids:
        task = session.client.cancel(session.task_id(given), reason=reason, force=force)
        if session.screen.json:
            session.screen.document(task)
            continue
        short = task["id"][-8:]
        if task["status"] == "canceled":
            session.screen.done(f"Canceled {short}  {clean(task.get('name'))}")
        else:
            where = f"it is on {clean(task['device_id'])}" if task.get("device_id") else "it was sent"
            session.screen.done(f"Cancel asked {short}: {where} and may still finish (--force ends it now)")


_NO_TASKS = "No task yet: create one with `scriptdispatch task create --device dev-001 --file hello.sh --follow`."


def span(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError as error:
        raise wrong(option, str(error)) from None


def _created(session: Session, task: dict[str, Any], *, watched: bool) -> None:
    if session.screen.json:
        if not watched:
            session.screen.document(task)
        return
    id = f"{task['id'][:4]}…{task['id'][-8:]}" if session.screen.people else task["id"]
    device = f" on {clean(task['device_id'])}" if task.get("device_id") else ""
    due = read(task.get("run_at"))
    later = f", at {shown(task['run_at'], utc=session.screen.utc)}" if due and due > SystemClock().now() else ""
    session.screen.done(f"Created {id}  {clean(task['name'])}{device}{later}")
    if task.get("queued") is False and not later:
        session.screen.note("  the queue is down; it is stored and runs when the queue is back", style="yellow")


def _watch(session: Session, task: dict[str, Any], *, follow: bool, timeout: float | None) -> None:
    from scriptdispatch.cli.follow import outcome, watch

    final = watch(session, task["id"], follow=follow, timeout=timeout)
    if session.screen.json:
        if follow:
            session.screen.json_line({"event": "end", **final})
        else:
            session.screen.document(final)
        raise typer.Exit(0 if final["status"] == "success" else 1)
    raise typer.Exit(outcome(session, final))


def _statuses(text: str | None) -> str | None:
    if text is None:
        return None
    names = [STATUS_WORDS.get(word, word) for word in (part.strip().lower() for part in text.split(",")) if word]
    for name in names:
        if name not in LOOKS:
            raise wrong("--status", f"{name!r} is not a state: {', '.join(LOOKS)}")
    return ",".join(names)


def _execution(session: Session, task: str, attempt: int | None) -> str | None:
    if attempt is None:
        return None
    rows = session.client.executions(task)
    found = next((row["id"] for row in rows if row["attempt"] == attempt), None)
    if found is None:
        raise wrong("--attempt", f"the task has {len(rows)} attempts so far")
    return str(found)


def _history_line(screen: Screen, row: dict[str, Any]) -> str:
    change = f"{row['from']} → {row['to']}" if row.get("from") and row.get("to") else (row.get("to") or row.get("kind"))
    return f"  {shown(row.get('at'), utc=screen.utc)}  {change}  {clean(row.get('reason'))}  ({clean(row.get('actor'))})"
