"""`make bench`: what the embedded product does on this machine, on a temporary SQLite file, all processes real.

    python benchmarks/run.py                       everything, about a minute and a half
    python benchmarks/run.py --only load --rounds 5
    python benchmarks/run.py --where               also where the time goes, with a probe inside the processes
    python benchmarks/run.py --profile consumer    the same, and a CPU profile of a role (lab, web, master, worker, consumer)

Other work on the machine makes every number worse: take the best of several rounds, and look at the load average.
"""

import argparse
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import measures
import report
from rig import Rig, sync_ms
from where import where_it_goes

from scriptdispatch import sqlite

PARTS = ("load", "light", "idle", "lines")
LOG_LINES = 5
MANY_LINES = (100, 500)  # tasks, lines of each


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=500, help="the tasks go round them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--light", type=float, default=20.0, metavar="N", help="creates per second at light load")
    parser.add_argument("--light-seconds", type=float, default=10.0)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--only", default=",".join(PARTS), help="a comma list of load, light, idle, lines; empty for none")
    parser.add_argument("--where", action="store_true", help="look inside the processes, too")
    parser.add_argument("--profile", metavar="ROLE", help="with --where, a CPU profile of this role")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end with us
    result: dict[str, Any] = {"machine": machine()}
    wanted = {part for part in given.only.split(",") if part}
    if unknown := wanted - set(PARTS):
        raise SystemExit(f"--only: no such part: {', '.join(sorted(unknown))}")
    if wanted - {"lines"}:
        result |= measure(given, wanted)
    if "lines" in wanted:
        with Rig(given.devices, log_lines=MANY_LINES[1], workers=given.workers) as rig:
            result["lines"] = measures.many_lines(rig, *MANY_LINES)
    if given.where or given.profile:
        result["where"] = where_it_goes(given.devices, given.tasks, given.profile)
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        report.show(result)


def measure(given: argparse.Namespace, wanted: set[str]) -> dict[str, Any]:
    """Idle before the heavy load: after it the reconciler still looks at what was closed in the last minutes, once."""
    found: dict[str, Any] = {}
    with Rig(given.devices, log_lines=LOG_LINES, workers=given.workers) as rig:
        measures.load_round(rig, 200, 0, LOG_LINES)  # warm-up
        if "light" in wanted:
            found["light"] = measures.light_load(rig, given.light, given.light_seconds)
        if "idle" in wanted:
            found["idle"] = measures.idle(rig, given.idle_seconds)
        if "load" in wanted:
            found["rounds"] = [measures.load_round(rig, given.tasks, rig.results(), LOG_LINES) for _ in range(given.rounds)]
        found["memory_mb"] = rig.memory_mb()
    return found


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "sqlite": sqlite.version(),
        "sync_ms": sync_ms(Path("/tmp") if Path("/tmp").is_dir() else Path()),
        "load_average": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
