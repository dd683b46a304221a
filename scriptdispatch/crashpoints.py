"""Named places where a test may end, stop or delay a process. Off unless SCRIPTDISPATCH_TEST_CRASH is set.

`SCRIPTDISPATCH_TEST_CRASH` is a comma list of `<place>=<action>[@<nth>][#<text>]`: `worker.after_W3=kill`,
`worker.before_W6=stop@2`, `closer.after_C2=kill#<task id>`, `worker.before_W5=delay:1500`, `worker.after_W1=spin:60`.
Each fires once per machine (`kill*` each time): a file in SCRIPTDISPATCH_TEST_CRASH_DIR records it, and lets the test see
that its fault did fire. `#text` fires only where the place's subject (a task id, device id) contains it.

`SCRIPTDISPATCH_TEST_GRACE_S` shortens the waits of 30 s and 60 s after which somebody counts as dead (`grace_s`).
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_plan: dict[str, tuple[str, int, str]] = {}
_hits: dict[str, int] = {}
_folder = Path(os.environ.get("SCRIPTDISPATCH_TEST_CRASH_DIR", "."))

for _entry in filter(None, os.environ.get("SCRIPTDISPATCH_TEST_CRASH", "").split(",")):
    _place, _, _rest = _entry.partition("=")
    _rest, _, _text = _rest.partition("#")
    _action, _, _nth = _rest.partition("@")
    _plan[_place] = (_action, int(_nth or 1), _text)

ENABLED = bool(_plan)
role = ""  # what this process is ("worker", "consumer"), for places that every process comes to


async def reach(place: str, subject: str = "") -> None:
    """The process has come to this place. In production: nothing."""
    if ENABLED and (action := _fires(place, subject)):
        if action.startswith("delay:"):
            await asyncio.sleep(int(action[6:]) / 1000)
        else:
            _act(action)


def reach_now(place: str, subject: str = "") -> None:
    """The same where nothing can be awaited (inside a transaction). A delay blocks."""
    if ENABLED and (action := _fires(place, subject)):
        if action.startswith("delay:"):
            time.sleep(int(action[6:]) / 1000)
        else:
            _act(action)


def subjects(ids: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(ids)) if ENABLED else ""


def planned(place: str) -> bool:
    return place in _plan


def grace_s(seconds: float) -> float:
    """The given time; in a test that says so, a shorter one."""
    shorter = os.environ.get("SCRIPTDISPATCH_TEST_GRACE_S")
    return min(seconds, float(shorter)) if shorter else seconds


def _fires(place: str, subject: str) -> str | None:
    if place not in _plan:
        return None
    action, nth, text = _plan[place]
    if text and text not in subject:
        return None
    _hits[place] = _hits.get(place, 0) + 1
    if _hits[place] < nth:
        return None
    every = action.endswith("*")
    try:
        with (_folder / f"fired.{place}").open("a" if every else "x") as mark:
            mark.write(f"{os.getpid()} {subject}\n")
    except FileExistsError:
        return None
    return action.rstrip("*")


def _act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread: it does not get one step further
    elif action == "raise":
        raise RuntimeError("a fault was injected here")
    elif action.startswith("exit:"):
        os._exit(int(action[5:]))
    elif action.startswith("spin:"):  # the loop is blocked
        end = time.monotonic() + float(action[5:])
        while time.monotonic() < end:
            pass
    else:
        raise ValueError(f"SCRIPTDISPATCH_TEST_CRASH: no such action: {action}")
