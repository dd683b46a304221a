"""Creates tasks as the peer's own users would: one by one with blocking calls, or 32 in flight with asyncio.

    python -m apps.producer apps.app_celery

reads orders from standard input, `load N` or `trickle N PER_SECOND`, and says `done` when the last of them is created.
"""

import asyncio
import importlib
import itertools
import sys
import time
from typing import Any

import pymongo

from apps import work

AT_ONCE = 32


class Producer:
    def __init__(self, app: Any) -> None:
        self._app, self._numbers = app, itertools.count(1)
        self._db: Any = pymongo.MongoClient(work.MONGO_URL)[work.DATABASE]

    def load(self, tasks: int) -> None:
        for _ in range(tasks):
            self._one()

    def trickle(self, tasks: int, per_second: float) -> None:
        start = time.perf_counter()
        for n in range(tasks):
            time.sleep(max(0.0, start + n / per_second - time.perf_counter()))
            self._one()

    def _one(self) -> None:
        task = work.task_document(next(self._numbers))
        self._db.tasks.insert_one(task)
        self._app.send(task["_id"], task["device"])


class AsyncProducer:
    def __init__(self, app: Any) -> None:
        import uvloop

        self._app, self._numbers = app, itertools.count(1)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.run(self._open())

    async def _open(self) -> None:
        self._db: Any = pymongo.AsyncMongoClient(work.MONGO_URL, maxPoolSize=64)[work.DATABASE]
        await self._app.start()

    def load(self, tasks: int) -> None:
        self._runner.run(self._load(iter(range(tasks))))

    def trickle(self, tasks: int, per_second: float) -> None:
        self._runner.run(self._trickle(tasks, per_second))

    async def _load(self, todo: Any) -> None:
        async def sender() -> None:
            for _ in todo:
                await self._one()

        await asyncio.gather(*(sender() for _ in range(AT_ONCE)))

    async def _trickle(self, tasks: int, per_second: float) -> None:
        start, sent = time.perf_counter(), []
        for n in range(tasks):
            await asyncio.sleep(max(0.0, start + n / per_second - time.perf_counter()))
            sent.append(asyncio.create_task(self._one()))
        await asyncio.gather(*sent)

    async def _one(self) -> None:
        task = work.task_document(next(self._numbers))
        await self._db.tasks.insert_one(task)
        await self._app.send(task["_id"], task["device"])


def main() -> None:
    app = importlib.import_module(sys.argv[1])
    producer = AsyncProducer(app) if hasattr(app, "start") else Producer(app)
    print("ready", flush=True)
    for order in sys.stdin:
        verb, count, *rest = order.split()
        if verb == "load":
            producer.load(int(count))
        else:
            producer.trickle(int(count), float(rest[0]))
        print("done", flush=True)


if __name__ == "__main__":
    main()
