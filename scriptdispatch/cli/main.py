"""The command line: all commands, and the one place where errors become a line on stderr and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not allowed, 4 not found, 5 conflict, 6 server unreachable,
124 time over, 130 interrupted. Modules with commands import typer and little else: what is heavy is imported when run.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from scriptdispatch.cli import (
    config,
    dev,
    device,
    doctor,
    lab,
    quarantine,
    reconcile,
    serve,
    stats,
    task,
    token,
    version,
    web,
    worker,
)
from scriptdispatch.cli.signs import clean
from scriptdispatch.errors import Refused, ScriptdispatchError, SettingsError

OK, FAILED, USAGE, NOT_ALLOWED, NOT_FOUND, CONFLICT, UNREACHABLE, TIME_OVER, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 124, 130
# What typer raises for wrong usage. It brings its own copy of click or uses the installed one, depending on its version.
UsageProblem: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="scriptdispatch",
    help="Runs scripts on fleets of devices: one at a time per device, nothing lost, nothing twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _part in (dev, serve, web, lab, stats, reconcile, doctor, config, version):
    _part.register(app)
app.add_typer(task.app, name="task", help="Create, watch and cancel tasks.")
app.add_typer(device.app, name="device", help="Devices with their locks and lanes.")
app.add_typer(worker.workers, name="worker", help="Worker processes.")
app.add_typer(worker.nodes, name="node", help="Nodes of the cluster.")
app.add_typer(token.app, name="token", help="Access tokens of the API.")
app.add_typer(quarantine.app, name="quarantine", help="Messages that could not be used.")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A name that this terminal cannot show must not end the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_is_gone()
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """Runs one command and answers its exit code."""
    as_json = "--json" in args
    try:
        outcome = app(args=list(args), prog_name="scriptdispatch", standalone_mode=False)
    except UsageProblem as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return USAGE  # the help was shown instead
        return _say(_usage_problem(error), as_json, usage=True)
    except typer.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_is_gone()
    except ScriptdispatchError as error:
        return _say(_problem(error), as_json)
    return outcome if isinstance(outcome, int) else OK


def exit_code(problem: dict[str, Any]) -> int:
    """The code for an answer of the API, by what it says."""
    status, code = int(problem.get("status") or 0), str(problem.get("code") or "")
    if code == "unreachable":
        return UNREACHABLE
    if code == "time_over":
        return TIME_OVER
    if status in (401, 403):
        return NOT_ALLOWED
    if status == 404 or code.endswith("_not_found"):
        return NOT_FOUND
    if status == 409 or code == "idempotency_mismatch":
        return CONFLICT
    return USAGE if status in (400, 413, 422) else FAILED


def _problem(error: ScriptdispatchError) -> dict[str, Any]:
    """Any error of ours as a problem, with what to do about it."""
    if isinstance(error, SettingsError):
        return {"status": 422, "code": "settings", "detail": str(error)}
    if isinstance(error, Refused):
        return {"status": error.status, "code": error.code, "detail": error.detail, "errors": error.errors, **error.extra}
    if "scriptdispatch.client" not in sys.modules:
        return {"status": 0, "code": "failed", "detail": str(error)}
    from scriptdispatch.client import ApiError, Unreachable, WaitTimeout

    if isinstance(error, ApiError):
        return error.problem
    if isinstance(error, WaitTimeout):
        return {"status": 0, "code": "time_over", "detail": str(error)}
    if isinstance(error, Unreachable):
        hint = "start it with `scriptdispatch dev`, or set SCRIPTDISPATCH_URL or --url"
        return {"status": 0, "code": "unreachable", "detail": str(error), "hint": hint}
    return {"status": 0, "code": "failed", "detail": str(error)}


def _usage_problem(error: Any) -> dict[str, Any]:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or "scriptdispatch"
    detail = " ".join(str(error.format_message()).removeprefix("Invalid value: ").split())
    return {"status": 0, "code": "usage", "detail": detail, "hint": f"see `{path} --help`"}


def _say(problem: dict[str, Any], as_json: bool, *, usage: bool = False) -> int:
    code = USAGE if usage else exit_code(problem)
    if as_json:
        sys.stderr.write(json.dumps(_whole(problem), ensure_ascii=False) + "\n")
        return code
    from scriptdispatch.cli.screen import Screen

    Screen().note(f"✕ {sentence(problem)}", style="red")
    return code


_TITLES = {
    "settings": "A setting is wrong",
    "usage": "Wrong usage",
    "unreachable": "The server does not answer",
    "time_over": "The time given is over",
    "failed": "It failed",
}


def _whole(problem: dict[str, Any]) -> dict[str, Any]:
    """What the API would say (RFC 9457), also of what never reached it."""
    code = str(problem.get("code") or "failed")
    title = _TITLES.get(code, code.replace("_", " "))
    return {"type": f"urn:scriptdispatch:problem:{code}", "title": title, **problem}


_HINTS = {
    "unauthorized": "set SCRIPTDISPATCH_TOKEN or --token; an operator makes one with `scriptdispatch token create`",
    "forbidden": "ask an operator for a token with the scope it names",
    "task_not_found": "give the whole id or at least its last 8 characters; `scriptdispatch task list` shows them",
    "lock_changed": "look again with `scriptdispatch device show`",
    "too_many_requests": "try again in a moment",
}


def sentence(problem: dict[str, Any]) -> str:
    """A problem on one line: what, which field, what to do."""
    detail = clean(problem.get("detail") or problem.get("title") or problem.get("code") or "failed")
    text = _with_fields(detail, problem.get("errors") or [])
    hint = problem.get("hint") or _HINTS.get(str(problem.get("code")))
    if not hint:
        return text
    return f"{text} {hint[0].upper()}{hint[1:]}" if text.endswith("?") else f"{text.rstrip('.')}; {hint}"


def _with_fields(detail: str, errors: list[dict[str, Any]]) -> str:
    """The sentence with the fields it is about, each said once."""
    rows = [(clean(row.get("field")), clean(row.get("message"))) for row in errors]
    if len(rows) == 1 and rows[0][1] in detail:
        return detail if rows[0][0] in detail else f"{rows[0][0]}: {detail}"
    named = [f"{field}: {message}" for field, message in rows if f"{field}: {message}" not in detail]
    return f"{detail.rstrip('.')} ({'; '.join(named)})" if named else detail


def _reader_is_gone() -> int:
    """Whoever read our output (`| head`) has what they wanted. Python must not complain about it at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


if __name__ == "__main__":
    main()
