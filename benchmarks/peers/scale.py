"""`make bench-scale`: what a task costs beside a million scheduled ones, and how long a decision takes with 100,000 lanes.

    python benchmarks/peers/scale.py                 about four minutes
    python benchmarks/peers/scale.py --scheduled 100000 --devices 10000

The scheduled tasks are put into MongoDB behind the product's back, as it would have stored them; the lanes are filled
through the product's own queue, without a node, so that what is timed is the queue's and the dispatcher's work alone.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import cost
import psutil
from ground import Ground
from product import Product
from run import load

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.lanes import lane_key
from scriptdispatch.domain.model import Task
from scriptdispatch.ids import new_id
from scriptdispatch.locks.port import Claim
from scriptdispatch.locks.redis import RedisLocks
from scriptdispatch.master.dispatcher import Dispatcher
from scriptdispatch.queue.port import Item
from scriptdispatch.queue.redis import RedisQueue
from scriptdispatch.queue.redis_channels import Channels
from scriptdispatch.redis_client import RedisClient
from scriptdispatch.settings import Settings
from scriptdispatch.store.mongo_documents import task_document

CHUNK = 5_000
LEASE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduled", type=int, default=1_000_000, help="tasks that wait for another day")
    parser.add_argument("--devices", type=int, default=100_000, help="devices with a lane")
    parser.add_argument("--lane", type=int, default=3, help="tasks in each lane")
    parser.add_argument("--tasks", type=int, default=3000, help="in each measured run")
    parser.add_argument("--rounds", type=int, default=3, help="runs before and after, of which the median counts")
    given = parser.parse_args()
    with Ground(same_mongod=True) as ground:
        beside_many(ground, given)
        asyncio.run(decisions(ground, given))


# ------------------------------------------------------------------------------------------------------- many scheduled


def beside_many(ground: Ground, given: argparse.Namespace) -> None:
    product = Product(ground, batch=250, senders=2, devices=given.tasks)
    with product.running():
        load(ground, product, 1000)
        empty = [load(ground, product, given.tasks) for _ in range(given.rounds)]
        show("beside nothing", empty, product)
        began = time.monotonic()
        fill(ground, product, given.scheduled)
        print(f"  {given.scheduled:,} scheduled tasks stored in {time.monotonic() - began:.0f} s", flush=True)
        full = [load(ground, product, given.tasks) for _ in range(given.rounds)]
        show(f"beside {given.scheduled:,}", full, product)
        restarted = product.restart_node()
        show(f"beside {given.scheduled:,}, a new master", [load(ground, product, given.tasks)], product)
        print(f"  the new master was ready after {restarted:.1f} s")
    ratio = median(map(spent_ms, full)) / median(map(spent_ms, empty))
    print(f"  a task costs {ratio:.2f}× the CPU that it costs on an empty store (asked for: 1.5×)", flush=True)


def fill(ground: Ground, product: Product, count: int) -> None:
    """Every minute of the next months some: none of them falls due while we measure."""
    tasks = product.database.script_task
    first = SystemClock().now() + timedelta(days=2)
    for start in range(0, count, CHUNK):
        made = [task_document(lifecycle.create(scheduled(n, first), None)) for n in range(start, min(count, start + CHUNK))]
        tasks.insert_many(made, ordered=False)


def scheduled(n: int, first: Any) -> Task:
    id, due, now = new_id(), first + timedelta(seconds=n % 10_000_000), SystemClock().now()
    return Task(
        id=id, name="at night", device_id=f"dev-{n % 100_000}", priority="normal", run_at=due, next_run_at=due,
        lane_key=lane_key(id, "normal", due), created_by="anonymous", created_at=now, updated_at=now,
    )  # fmt: skip


def spent_ms(row: dict[str, Any]) -> float:
    return sum(row["cpu_us"].values()) / 1000


def show(what: str, rows: Sequence[dict[str, Any]], product: Product) -> None:
    if wrong := [row["wrong"] for row in rows if row["wrong"]]:
        raise SystemExit(f"{what}: {wrong}")
    master = psutil.Process(product.alone["master"]).memory_info().rss / 1e6
    rate = median(row["tasks_per_s"] for row in rows)
    print(
        f"{what}: {rate:,.0f} tasks/s, {median(map(spent_ms, rows)):.2f} ms CPU a task, master {master:.0f} MB", flush=True
    )


# ------------------------------------------------------------------------------------------------------------ decisions


class Hands:
    """A worker as the dispatcher sees one: it takes whatever it is sent."""

    def __init__(self, id: str) -> None:
        self.id = id

    def send(self, _: object) -> None:
        return


async def decisions(ground: Ground, given: argparse.Namespace) -> None:
    client, clock = RedisClient(ground.urls["redis"]), SystemClock()
    queue = RedisQueue(client, Channels(client), "scale:", clock)
    locks = RedisLocks(client, "scale:", clock)
    await queue.open()
    await locks.set_intact()
    items = list(lanes(given.devices, given.lane, clock))
    began = time.monotonic()
    for start in range(0, len(items), CHUNK):
        await queue.push(items[start : start + CHUNK])
    used = (await client.command("INFO", "memory")).split(b"used_memory_human:")[1].split()[0].decode()
    print(
        f"{given.devices:,} lanes of {given.lane}, queued in {time.monotonic() - began:.0f} s, {used} of Redis", flush=True
    )
    await queue.renew("node", LEASE_S)
    for size in (1, 100, 500):
        await decide(ground, queue, locks, size, 2000 if size > 1 else 500)
    await queue.close()


async def decide(ground: Ground, queue: RedisQueue, locks: RedisLocks, size: int, count: int) -> None:
    """Hear, check, balance, hand out; then what follows: the lock, and the item given up while the device stays closed."""
    workers = [Hands(f"worker-{n}") for n in range(8)]
    dispatcher = Dispatcher(queue, Settings(workers=8, worker_capacity=512), "node", lambda: cast(Any, workers), 3, print)
    redis = {"redis": ground.pids["redis"]}
    took_s, done = 0.0, 0
    before, own = cost.snapshot({}, redis), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    while done < count:
        began = time.perf_counter()
        heard = await queue.take("node", size, wait_s=1)
        dispatcher.hear(heard)
        took_s += time.perf_counter() - began
        done += len(heard)
        claims = [Claim(device_id=i.device_id or "", execution_id=new_id(), task_id=i.task_id, ttl_s=LEASE_S) for i in heard]
        await locks.acquire(claims)
        await queue.finish(heard)
        for worker in workers:
            dispatcher.lost(cast(Any, worker))
    spent = cost.per_task_us(before, cost.snapshot({}, redis), done)["redis"]
    ours = (resource.getrusage(resource.RUSAGE_SELF).ru_utime - own) / done * 1e6
    print(f"  {size:3} at a time: a decision takes {took_s / done * 1e6:.0f} µs (asked for: 200); with lock and finish "
          f"{spent:.0f} µs CPU of Redis and {ours:.0f} µs of ours", flush=True)  # fmt: skip


def lanes(devices: int, depth: int, clock: SystemClock) -> Iterator[Item]:
    now = clock.now()
    for n in range(devices * depth):
        id = new_id()
        yield Item(task_id=id, device_id=f"dev-{n % devices}", lane_key=lane_key(id, "normal", now), due_at=now)


if __name__ == "__main__":
    main()
