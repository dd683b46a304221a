"""Watching one task from the terminal until it is final: its states, its progress, its output as it comes."""

from types import TracebackType
from typing import Any, Self

import typer

from scriptdispatch.cli.session import Session
from scriptdispatch.cli.signs import clean, clean_line, look
from scriptdispatch.cli.times import read, shown, span_ms
from scriptdispatch.clock import SystemClock

FINAL = ("success", "failed", "canceled")
RECONNECTED = "  reconnected, nothing lost"
WIDEST = 10  # of the state words, so that what follows stands in a column


class Printer:
    """Lines of output and of what happens, above one live line of progress if somebody is looking."""

    def __init__(self, session: Session, *, times: bool = False, raw: bool = False, states: bool = True) -> None:
        self._screen, self._times, self._raw, self._states = session.screen, times, raw, states
        self._last: tuple[Any, ...] = ()
        self._progress: Any = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Takes the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._bar = None

    def log(self, line: dict[str, Any]) -> None:
        if self._screen.json:
            self._screen.json_line(line)
            return
        colour = self._screen.coloured
        content = str(line.get("content", ""))
        text = content if self._raw else clean_line(content, colour=colour)
        stamp = f"{shown(line.get('time'), utc=self._screen.utc)}  " if self._times else ""
        if self._progress is not None:
            from rich.text import Text

            self._progress.console.print(Text.from_ansi(stamp + text), soft_wrap=True)
        elif line.get("stream") == "stderr" and "\x1b" not in text:
            self._screen.line(stamp + text, style="yellow")
        else:
            self._screen.line(stamp + text)

    def state(self, task: dict[str, Any]) -> None:
        """Says what has changed; the final line is `outcome`'s."""
        if self._screen.json or not self._states or task.get("status") in FINAL:
            return
        why = (task.get("waiting_for") or {}).get("message")
        told = (task.get("status"), task.get("attempt"), task.get("push"))
        if told == self._last:
            return
        self._last = told
        sign, word, _ = look(str(task.get("status")), task.get("push"))
        about = _about_state(task, why)
        self.say(f"  {sign} {word:<{WIDEST}} {about}".rstrip())

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(self._screen.own(text), soft_wrap=True)
        else:
            self._screen.note(text)

    def advance(self, progress: Any, step: Any) -> None:
        if not self._screen.live or not self._states:
            return
        if self._progress is None and not step and progress in (None, 0, 100):
            return  # most scripts never say more than that they began and ended
        description = clean(step) if step else "running"
        if self._progress is None:
            self._start_bar(description, float(progress or 0))
        self._progress.update(self._bar, completed=float(progress or 0), description=description, refresh=True)

    def _start_bar(self, description: str, completed: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        # Named colours: rich's own end as grey, like what is left, on a terminal of 16 colours.
        bar = BarColumn(bar_width=20, complete_style="cyan", finished_style="green")
        columns = (TextColumn("  {task.description}"), TextColumn("{task.percentage:>3.0f} %"), bar)
        self._progress = Progress(
            *columns,
            console=self._screen.console(),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar = self._progress.add_task(description, total=100, completed=completed)
        self._progress.start()


def watch(session: Session, task_id: str, *, follow: bool, timeout: float | None) -> dict[str, Any]:
    """Until the task is final; answers it. With `follow` its output is printed as it comes. Ctrl-C ends the watching
    only (exit 130), as does the timeout (exit 124): the task goes on."""
    from scriptdispatch.client import NO_LINES

    with Printer(session) as printer:
        try:
            for event in session.client.follow(task_id, after=None if follow else NO_LINES, timeout=timeout):
                _show(session, printer, event.name, event.data, follow)
        except KeyboardInterrupt:
            printer.end()
            session.screen.note(f"Interrupted; task {task_id[-8:]} goes on. See `scriptdispatch task show {task_id[-8:]}`.")
            raise typer.Exit(130) from None
    return session.client.get(task_id)


def _show(session: Session, printer: Printer, name: str, data: dict[str, Any], follow: bool) -> None:
    if session.screen.json:
        if follow and name != "reconnected":
            session.screen.json_line({"event": name, **data})
        return
    if name == "log" and follow:
        printer.log(data)
    elif name == "state":
        printer.state(data)
    elif name == "progress":
        printer.advance(data.get("progress"), data.get("step"))
    elif name == "reconnected":
        printer.say(RECONNECTED)


def outcome(session: Session, task: dict[str, Any]) -> int:
    """The final line, and the exit code that goes with it."""
    status = str(task["status"])
    sign, word, style = look(status)
    parts = []
    execution = _latest(session, task)
    if execution.get("exit_code") is not None:
        parts.append(f"exit {execution['exit_code']}")
    if execution.get("run_ms") is not None:
        parts.append(f"run {span_ms(execution['run_ms'])}")
    if status != "success" and task.get("error"):
        parts.append(f"{clean(task['error'].get('code'))}: {clean(task['error'].get('message'))}")
    if task.get("attempt", 1) > 1:
        parts.append(f"attempt {task['attempt']}")
    session.screen.parts((f"{sign} {word:<{WIDEST}}", style), (f" {' · '.join(parts)}", ""))
    return 0 if status == "success" else 1


def _latest(session: Session, task: dict[str, Any]) -> dict[str, Any]:
    rows = session.client.executions(task["id"])
    return next((row for row in reversed(rows) if row["id"] == task.get("execution_id")), {})


def _about_state(task: dict[str, Any], why: str | None) -> str:
    if task.get("status") == "send_success" and task.get("push") != "unknown" and not task.get("cancel_requested"):
        return f"attempt {task.get('attempt')}" + (f" on {clean(task['device_id'])}" if task.get("device_id") else "")
    if why:
        return clean(why).rstrip(".")
    if task.get("status") == "failed_waiting_retry":
        code = clean((task.get("error") or {}).get("code") or "failed")
        due = read(task.get("next_run_at"))
        left_ms = (due - SystemClock().now()).total_seconds() * 1000 if due else 0
        return f"attempt {task.get('attempt')} failed: {code}; tries again in {span_ms(max(0.0, left_ms))}"
    return ""
