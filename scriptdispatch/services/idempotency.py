"""`Idempotency-Key` (SPEC 4.4): a request that is repeated gets the first answer again, and creates nothing twice.

The first one is remembered before it does anything, with a seed from which the ids of what it creates are derived. So
one that died half way can be taken over: whoever repeats it chooses the same ids. Whoever comes while the first is under
way waits for its answer.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import Struct

from scriptdispatch import crashpoints, logs
from scriptdispatch.clock import Clock
from scriptdispatch.errors import Refused, Unavailable
from scriptdispatch.ids import new_id
from scriptdispatch.store.port import Remembered, Store

KEPT: Final = timedelta(hours=24)
DEAD_AFTER: Final = timedelta(seconds=crashpoints.grace_s(30))  # a first one without an answer for so long is taken over
WAIT_S: Final = 30.0
ABANDONED: Final = datetime(2000, 1, 1, tzinfo=UTC)  # begun_at of one that ended without an answer: free to take over
log = logs.get("idempotency")


class Answer(Struct, frozen=True, kw_only=True):
    """`created` False: nothing was stored, so it is not worth remembering."""

    status: int
    body: bytes
    created: bool = True
    replayed: bool = False


# (seed for derived ids, whether an earlier one may have created some) -> answer
Work = Callable[[str, bool], Awaitable[Answer]]


class Idempotency:
    def __init__(self, store: Store, clock: Clock, *, wait_s: float = WAIT_S, dead_after: timedelta = DEAD_AFTER) -> None:
        self._store, self._clock = store, clock
        self._wait_s, self._dead_after = wait_s, dead_after

    async def run(self, owner: str, key: str, path: str, body: Any, work: Work) -> Answer:
        """The answer of `work`, or of the one that was first under (owner, key)."""
        check_key(key)
        wanted = Remembered(seed=new_id(), request_hash=request_hash(path, body), begun_at=self._clock.now())
        give_up_at = self._clock.uptime() + self._wait_s
        pause_s = 0.01
        while True:
            first = await self._store.remember(owner, key, wanted)
            if first is None:
                return await self._work(owner, key, wanted, work, repeat=False)
            if first.request_hash != wanted.request_hash:
                detail = "this Idempotency-Key was used with another request: use a new key for a new request"
                raise Refused(422, "idempotency_mismatch", detail, [("Idempotency-Key", detail)])
            if first.answer is not None and first.status is not None:
                if self._clock.now() - first.begun_at > KEPT:  # the cleaner has not been here yet
                    await self._store.forget(owner, key)
                    continue
                return Answer(status=first.status, body=first.answer, replayed=True)
            now = self._clock.now()
            if now - first.begun_at > self._dead_after and await self._store.take_over(owner, key, first.begun_at, now):
                return await self._work(owner, key, msgspec.structs.replace(first, begun_at=now), work, repeat=True)
            if self._clock.uptime() >= give_up_at:
                detail = "the first request with this Idempotency-Key is still under way; repeat it with the same key later"
                raise Refused(409, "illegal_state", detail, current="under way")
            await asyncio.sleep(pause_s)  # the first one may be in another process: it cannot tell us
            pause_s = min(0.5, pause_s * 2)

    async def _work(self, owner: str, key: str, request: Remembered, work: Work, *, repeat: bool) -> Answer:
        try:
            answer = await work(request.seed, repeat)
        except Refused:
            # Nothing was stored by this one; an earlier one may have stored something before it died.
            await (self._abandon(owner, key, request) if repeat else self._forget(owner, key))
            raise
        except Exception:
            await self._abandon(owner, key, request)
            raise
        if answer.created:
            await self._remember_answer(owner, key, request, answer)
        else:
            await self._forget(owner, key)
        return answer

    async def _remember_answer(self, owner: str, key: str, request: Remembered, answer: Answer) -> None:
        """The tasks are stored, so the answer is given even if it cannot be kept: a repeat finds the same ids."""
        try:
            await self._store.answer(owner, key, answer.status, answer.body)
        except Unavailable as error:
            log.warning("an answer could not be remembered", event_name="idempotency.unanswered", error=str(error))
            await self._abandon(owner, key, request)

    async def _forget(self, owner: str, key: str) -> None:
        try:
            await self._store.forget(owner, key)
        except Unavailable as error:  # a repeat waits until it counts as dead, then takes over
            log.warning("a failed request could not be forgotten", event_name="idempotency.kept", error=str(error))

    async def _abandon(self, owner: str, key: str, request: Remembered) -> None:
        """Ended, perhaps with something stored: a repeat may take over at once, with the same ids."""
        try:
            await self._store.take_over(owner, key, request.begun_at, ABANDONED)
        except Unavailable as error:
            log.warning("a repeat of this request has to wait", event_name="idempotency.kept", error=str(error))


def request_hash(path: str, body: Any) -> str:
    """Of what is asked, not of how it is written: the order of fields and white space do not count."""
    return hashlib.sha256(path.encode() + b"\0" + msgspec.json.encode(body, order="sorted")).hexdigest()


def check_key(key: str) -> None:
    if not 1 <= len(key) <= 255 or not key.isprintable():
        message = "must have 1 to 255 printable characters"
        raise Refused(422, "validation_error", f"Idempotency-Key {message}", [("Idempotency-Key", message)])
