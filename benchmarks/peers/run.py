"""`make bench-peers`: the product against Celery, dramatiq and taskiq on the same servers, in turns, several rounds.

    python benchmarks/peers/run.py --peers DIR             three rounds of 3,000 tasks, 8 to 10 minutes
    python benchmarks/peers/run.py --peers DIR --quick     one round of 1,000
    python benchmarks/peers/run.py --only product          without the peers

DIR is the environment that has `requirements.txt` of this folder. Every run is checked: tasks, executions, log lines and
pushes exactly as many as there must be, no lock left; a run that is not right does not count, and the exit code says so.
Other work on the machine makes every number worse; it hits all alike, so the ratio is what counts.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import cost
import report
from ground import Ground, wait_for
from peer import PEERS, Peer
from product import NAME, SAME, Product

LOG_LINES = 5
WARM_UP = 1000  # the broker compiles itself while it works
ROUND_S = 180.0
SETTLE_S = 0.3  # acknowledgements and the last reports, counted for all
MANY_LINES = (50, 1000)  # tasks, lines of each
Competitor = Product | Peer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the environment of the peers")
    parser.add_argument("--tasks", type=int, default=3000, help="in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 1,000 tasks")
    parser.add_argument("--only", help=f"a comma list of: {NAME}, {', '.join(name.split()[0] for name in PEERS)}")
    parser.add_argument("--batch", type=int, default=250, help="tasks in one create of the product's API")
    parser.add_argument("--senders", type=int, default=2, help="clients that create batches at the same time")
    parser.add_argument("--devices", type=int, default=3000, help="the product's tasks go round them")
    parser.add_argument("--light", type=float, default=20.0, metavar="N", help="creates per second at light load")
    parser.add_argument("--light-seconds", type=float, default=8.0)
    parser.add_argument("--same-mongod", action="store_true", help="the peers on the product's replica set, too")
    parser.add_argument("--json", type=Path, help="write what was measured to this file, too")
    given = parser.parse_args()
    if given.quick:
        given.tasks, given.rounds, given.light_seconds = 1000, 1, 5.0
    return given


def main() -> int:
    given = arguments()
    rows: list[dict[str, Any]] = []
    with Ground(same_mongod=given.same_mongod) as ground:
        competitors = chosen(ground, given)
        for number in range(given.rounds):
            turn = number % len(competitors)
            for competitor in [*competitors[turn:], *competitors[:turn]]:  # nobody is always the first
                row = measured(ground, competitor, given) | {"round": number + 1}
                report.progress(row)
                rows.append(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2))
    report.show(rows, (NAME, SAME))
    return 1 if any(row["wrong"] for row in rows) else 0


def chosen(ground: Ground, given: argparse.Namespace) -> list[Competitor]:
    wanted = given.only.split(",") if given.only else [NAME, *(name.split()[0] for name in PEERS)]
    found: list[Competitor] = []
    if NAME in wanted:
        for same in (False,) if given.same_mongod else (False, True):
            found.append(Product(ground, batch=given.batch, senders=given.senders, devices=given.devices, same=same))
    for name in PEERS:
        if name.split()[0] in wanted:
            if given.peers is None or not (given.peers / "bin" / "python").exists():
                raise SystemExit(
                    "--peers: an environment with benchmarks/peers/requirements.txt (make bench-peers makes it)"
                )
            found.append(Peer(ground, name, given.peers.absolute()))
    return found


def measured(ground: Ground, competitor: Competitor, given: argparse.Namespace) -> dict[str, Any]:
    ground.settle()
    with competitor.running():
        load(ground, competitor, WARM_UP)
        ground.settle()
        row = load(ground, competitor, given.tasks)
        light_ms, wrong = light(competitor, given.light, given.light_seconds)
        row |= {"light_ms": light_ms, "wrong": row["wrong"] + wrong}
        if isinstance(competitor, Product):
            lines_per_s, wrong = many_lines(competitor)
            row |= {"lines_per_s": lines_per_s, "wrong": row["wrong"] + wrong}
    return row


def load(ground: Ground, competitor: Competitor, tasks: int) -> dict[str, Any]:
    """From the first create until the last task is `success` and its lock is gone."""
    alone = competitor.alone | ({"client": os.getpid()} if isinstance(competitor, Product) else {})
    trees = competitor.trees | ground.servers(competitor.mongo, broker=isinstance(competitor, Product))
    competitor.stub.reset(LOG_LINES)
    competitor.fresh()
    before, began = cost.snapshot(trees, alone), time.perf_counter()
    competitor.create(tasks)
    created_s = time.perf_counter() - began
    wait_for(lambda: competitor.stub.count() >= tasks, ROUND_S, f"{tasks} pushes of {competitor.name}", every_s=0.05)
    wait_for(competitor.finished, ROUND_S, f"{tasks} tasks of {competitor.name} to end", every_s=0.005)
    took_s = time.perf_counter() - began
    time.sleep(SETTLE_S)
    spent = cost.per_task_us(before, cost.snapshot(trees, alone), tasks)
    return {
        "name": competitor.name,
        "tasks": tasks,
        "tasks_per_s": round(tasks / took_s, 1),
        "created_per_s": round(tasks / created_s, 1),
        "cpu_us": spent,
        "load_average": round(os.getloadavg()[0], 2),
        "wrong": competitor.wrong(tasks, LOG_LINES),
    }


def light(competitor: Competitor, per_second: float, seconds: float) -> tuple[list[float], list[str]]:
    """Create → pushed when there is hardly anything to do, each in ms."""
    time.sleep(1)
    tasks = int(per_second * seconds)
    competitor.stub.reset(LOG_LINES)
    competitor.fresh()
    competitor.trickle(tasks, per_second)
    wait_for(lambda: competitor.stub.count() >= tasks, ROUND_S, f"{tasks} pushes of {competitor.name}")
    wait_for(competitor.finished, ROUND_S, f"{tasks} tasks of {competitor.name} to end")
    return competitor.stub.latencies_ms(), competitor.wrong(tasks, LOG_LINES)


def many_lines(product: Product) -> tuple[float, list[str]]:
    """Few tasks that say a lot: from the first create until one consumer has stored the last line."""
    tasks, lines = MANY_LINES
    product.stub.reset(lines)
    product.fresh()
    before, began = product.stored_lines(), time.perf_counter()
    product.create(tasks)
    wait_for(lambda: product.stored_lines() - before >= tasks * lines, ROUND_S, "all lines to be stored", every_s=0.01)
    took_s = time.perf_counter() - began
    wait_for(product.finished, ROUND_S, "the tasks that said a lot to end")
    return round(tasks * lines / took_s, 1), product.wrong(tasks, lines)


if __name__ == "__main__":
    sys.exit(main())
