"""Tasks by status, counted in the index: exact, and at a cost that grows with their number (about 1 µs each).

A status whose count took long is not counted again at once: its number is then up to AGE times as old as counting took, so
that whoever asks often costs the server no more than a twentieth of its time. Short counts are always fresh.
"""

import time
from typing import Final

from scriptdispatch.domain.model import STATUSES
from scriptdispatch.store.mongo_schema import TASKS
from scriptdispatch.store.mongo_writes import Database

SHORT_S: Final = 0.05  # some ten thousand tasks
AGE: Final = 20.0


class StatusCounts:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._slow: dict[str, tuple[int, float]] = {}  # status -> its number, and until when it will do

    async def read(self) -> dict[str, int]:
        return {status: await self._count(status) for status in STATUSES}

    async def _count(self, status: str) -> int:
        begun = time.monotonic()
        number, until = self._slow.get(status, (0, 0.0))
        if begun < until:
            return number
        answer = await self._database.command({"count": TASKS, "query": {"status": status}, "hint": "by_status"})
        number, now = int(answer["n"]), time.monotonic()
        if now - begun > SHORT_S and number > SHORT_S * 100_000:  # a slow moment of the server is no reason
            self._slow[status] = (number, now + AGE * (now - begun))
        else:
            self._slow.pop(status, None)
        return number
