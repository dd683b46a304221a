"""Who has a message in hand, in a form that tells others on this machine whether that process still lives."""

import os
from pathlib import Path

from scriptdispatch.ids import new_id


def new_owner() -> str:
    """`<pid>.<start of the process>.<fresh id>`: a process that got the pid of a dead one is not taken for it."""
    pid = os.getpid()
    return f"{pid}.{_started(pid) or ''}.{new_id()}"


def is_dead(owner: str) -> bool:
    pid, started, _ = owner.split(".", 2)
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it is another user's, and it lives
    return bool(started) and _started(int(pid)) != started


def _started(pid: int) -> str | None:
    """Start time of a process that runs, in ticks since boot; None where there is no /proc, or if it is gone. A zombie
    has ended, whether its parent has noticed or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
