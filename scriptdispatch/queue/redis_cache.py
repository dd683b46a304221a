"""Final tasks on Redis, for those who read them again (SPEC 4.3): in the web process, to be shown and never to decide on.

What is kept is never stale, and nobody has to drop it, because nothing can happen to it while it is here:

- Only final tasks are kept, and nothing changes what a final task answers (a test looks through `lifecycle`). Whoever builds
  what does (a restart, a removal by hand) marks the key before and after: SET to nothing with an expiry, and `put` with NX.
- What clean-up may soon remove is neither kept nor answered, however late somebody kept it.
- Callers keep only what the store can not take back any more.

Redis carries queue and locks, too, and full it would stop both: so what is kept is small, and bounded. Tasks with secrets
are left out: secrets are in the store and nowhere else.
"""

import asyncio
import hashlib
from typing import Any

import msgspec

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import FINAL, Task
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.redis_client import RedisClient, Word

KEPT_S = 300
MARGIN_S = 600.0  # before clean-up may remove it: clocks that disagree, an answer that takes its time
PATIENCE_S = 0.1
REST_S = 1.0  # after a failure nobody asks Redis for so long
MOST_BYTES = 64 * 1024  # of one task
MOST_MOVING = 10_000
ROOM_BYTES = 32 * 1024 * 1024  # kept by one process within KEPT_S; so at most twice as much is there
# Says how the task behind it was written: one of another version has other fields, and is not there for us.
SHAPE = hashlib.sha256(msgspec.json.encode(msgspec.json.schema(Task))).digest()[:8]
# JSON, as in the stores: what a script answered may have numbers that msgpack can not hold.
_decoder = msgspec.json.Decoder(Task)
log = logs.get("queue")


class RedisTaskCache:
    """Never raises and never takes long: what Redis does not answer at once is not there. `retention_s`: how long after its
    end a task is safe from clean-up; 0: for ever."""

    def __init__(self, client: RedisClient, prefix: str, clock: Clock, retention_s: float) -> None:
        self._client, self._prefix, self._clock, self._retention_s = client, f"{prefix}task:", clock, retention_s
        self._rests_until = self._room_until = float("-inf")
        self._room = 0
        self._moving: dict[str, None] = {}  # were not final when they were last read: who polls them need not come here

    async def get(self, task_id: str) -> Task | None:
        if task_id in self._moving:
            return None
        task = _unpacked(await self._ask("GET", self._prefix + task_id))
        return task if task is not None and self._may_be_kept(task) else None

    def wants(self, task: Task) -> bool:
        """Would `put` keep it now? To be asked of each task that was read: those that are not final are remembered."""
        if task.status not in FINAL:
            self._moving[task.id] = None
            if len(self._moving) > MOST_MOVING:
                del self._moving[next(iter(self._moving))]
            return False
        self._moving.pop(task.id, None)
        return self._may_be_kept(task) and not self._rests() and self._has_room() and _packed(task) is not None

    async def put(self, task: Task) -> None:
        value = _packed(task)
        if value is not None and self._may_be_kept(task) and self._has_room():
            self._room -= len(value)
            await self._ask("SET", self._prefix + task.id, value, "EX", KEPT_S)

    def _may_be_kept(self, task: Task) -> bool:
        if task.status not in FINAL or task.finished_at is None or task.secret_params:
            return False
        age_s = (self._clock.now() - task.finished_at).total_seconds()
        return not self._retention_s or age_s < self._retention_s - MARGIN_S

    def _has_room(self) -> bool:
        now = self._clock.uptime()
        if now >= self._room_until:
            self._room, self._room_until = ROOM_BYTES, now + KEPT_S
        return self._room > 0

    def _rests(self) -> bool:
        return self._clock.uptime() < self._rests_until

    async def _ask(self, *words: Word) -> Any:
        if self._rests():
            return None
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._client.command(*words)
        except (QueueUnavailable, TimeoutError) as error:
            self._rests_until = self._clock.uptime() + REST_S
            log.info("tasks are read from the store", event_name="cache.away", reason=str(error) or "Redis is slow")
            return None


def _packed(task: Task) -> bytes | None:
    """None: too large, or nested too deeply."""
    try:
        value = SHAPE + msgspec.json.encode(task)
    except RecursionError:
        return None
    return value if len(value) <= MOST_BYTES else None


def _unpacked(value: Any) -> Task | None:
    """None: not there, of another version, or spoilt."""
    if not isinstance(value, bytes) or not value.startswith(SHAPE):
        return None
    try:
        return _decoder.decode(value[len(SHAPE) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
