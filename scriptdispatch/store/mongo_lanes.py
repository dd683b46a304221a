"""Group commit: changes that arrive while a flush is under way go together in the next one. No timers, nothing waits when
idle. Each kind of change has its own lane, one flush at a time; each caller gets its own outcomes.

A lane gives every batch a token, and the batch keeps it however often it is sent: see `mongo_writes`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from bson import ObjectId

from scriptdispatch.domain.changes import Applied
from scriptdispatch.errors import StoreUnavailable

C = TypeVar("C")
MAX_BATCH: Final = 500
MAX_WAITING: Final = 50_000  # changes in one lane, beyond which callers are turned away
Flush = Callable[[Sequence[C], ObjectId], Awaitable[list[Applied]]]


class Job:
    """One caller's call: its outcomes arrive one by one, from several lanes."""

    def __init__(self, size: int) -> None:
        self.outcomes: list[Applied | None] = [None] * size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = size
        self._errors: list[BaseException] = []

    def settle(self, place: int, outcome: Applied | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._errors.append(outcome)
        else:
            self.outcomes[place] = outcome
        self._left -= 1
        if self._left == 0 and not self.done.done():  # a caller that was canceled has left
            self._finish()

    def _finish(self) -> None:
        if not self._errors:
            self.done.set_result(None)
            return
        error = next((e for e in self._errors if not isinstance(e, StoreUnavailable)), self._errors[0])
        if isinstance(error, StoreUnavailable):
            # If some of it happened, or may have, the call as a whole is unclear; repeating it is safe.
            untouched = len(self._errors) == len(self.outcomes) and not any(map(_unclear, self._errors))
            error = StoreUnavailable(str(error), outcome_unknown=not untouched)
        self.done.set_exception(error)


def _unclear(error: BaseException) -> bool:
    return not isinstance(error, StoreUnavailable) or error.outcome_unknown


class Lane(Generic[C]):
    """`subject` names what a change writes to: one batch never has two changes of one subject, and their order is kept."""

    def __init__(self, flush: Flush[C], subject: Callable[[C], str]) -> None:
        self._flush, self._subject = flush, subject
        self._waiting: deque[tuple[Job, int, C]] = deque()
        self._runner: asyncio.Task[None] | None = None

    def submit(self, job: Job, changes: Sequence[tuple[int, C]]) -> None:
        if len(self._waiting) + len(changes) > MAX_WAITING:
            full = StoreUnavailable(f"{len(self._waiting)} changes are waiting to be written already")
            for place, _ in changes:
                job.settle(place, full)
            return
        self._waiting.extend((job, place, change) for place, change in changes)
        if self._runner is None:
            # It starts in the loop's next turn: those who call within this one share the first flush.
            self._runner = asyncio.create_task(self._run())

    async def drain(self) -> None:
        """Until all that was submitted is settled. Bounded by the time that a flush may take."""
        while self._runner is not None:
            await asyncio.wait([self._runner])

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._flush_one(self._take())
        finally:
            self._runner = None

    def _take(self) -> list[tuple[Job, int, C]]:
        batch: list[tuple[Job, int, C]] = []
        held: list[tuple[Job, int, C]] = []
        subjects: set[str] = set()
        while self._waiting and len(batch) < MAX_BATCH and len(held) < MAX_BATCH:
            entry = self._waiting.popleft()
            subject = self._subject(entry[2])
            if subject in subjects:
                held.append(entry)
            else:
                subjects.add(subject)
                batch.append(entry)
        self._waiting.extendleft(reversed(held))
        return batch

    async def _flush_one(self, batch: Sequence[tuple[Job, int, C]]) -> None:
        token = ObjectId()
        try:
            outcomes: Sequence[Applied | BaseException] = await self._flush([change for _, _, change in batch], token)
        except StoreUnavailable as error:
            outcomes = [error] * len(batch)
            self._turn_away(error)
        except Exception as error:
            outcomes = [error] if len(batch) == 1 else await self._one_by_one(batch, token)
        except BaseException as error:  # the loop is ending; nobody may wait for ever
            for job, place, _ in batch:
                job.settle(place, StoreUnavailable(f"the store was closed: {error!r}", outcome_unknown=True))
            self._turn_away(StoreUnavailable("the store was closed"))
            raise
        for (job, place, _), outcome in zip(batch, outcomes, strict=True):
            job.settle(place, outcome)

    async def _one_by_one(self, batch: Sequence[tuple[Job, int, C]], token: ObjectId) -> list[Applied | BaseException]:
        """Something in the batch cannot be written at all: only its own caller is to suffer. The token stays the same, so
        that what the batch has written already counts as won and is not written again."""
        outcomes: list[Applied | BaseException] = []
        for _, _, change in batch:
            try:
                outcomes += await self._flush([change], token)
            except StoreUnavailable as error:
                # Whether the batch had written the rest before it failed is not known.
                away = StoreUnavailable(str(error), outcome_unknown=True)
                return [*outcomes, *[away] * (len(batch) - len(outcomes))]
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def _turn_away(self, error: StoreUnavailable) -> None:
        """The store has not answered for as long as anybody should wait: so have those behind waited."""
        away = StoreUnavailable(str(error))
        while self._waiting:
            job, place, _ = self._waiting.popleft()
            job.settle(place, away)
