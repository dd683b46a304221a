"""Closes out what central control reports: C1 store, C2 close, C3 settle, C4 release, C5 acknowledge (PROTOCOL).

Runs in a consumer process. A batch is acknowledged only when all that it asked for is durable; what cannot be used goes
to the quarantine and the dead-letter topic and never holds up its neighbours. A batch that comes again ends the same.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from scriptdispatch import crashpoints, logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import Applied, Change, ChangeExecution
from scriptdispatch.domain.model import Execution, LogLine, Message, Outcome
from scriptdispatch.errors import StoreUnavailable, Unavailable
from scriptdispatch.metrics import Metrics
from scriptdispatch.mq.messages import TERMINAL, Unusable, check, error_of, line_of, parse, quarantined
from scriptdispatch.mq.port import Delivery
from scriptdispatch.queue.port import Event
from scriptdispatch.services.closing import Closing
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

Rows = dict[str, Execution]
log = logs.get("closer")


class Read(Struct, frozen=True):
    """A usable message with its delivery and its execution as read before anything was written."""

    delivery: Delivery
    message: Message
    row: Execution


class Closer:
    def __init__(self, backends: Backends, settings: Settings, metrics: Metrics) -> None:
        self._backends, self._settings, self._metrics = backends, settings, metrics
        self._closing = Closing(backends, settings, role="closer", metrics=metrics)

    async def close_out(self, deliveries: Sequence[Delivery]) -> None:
        """C1 to C5 for one batch. Raises `Unavailable` with nothing acknowledged; the caller comes again."""
        now = self._backends.clock.now()
        usable, refused = await self._read(deliveries)
        await crashpoints.reach("closer.after_receive", _subject(usable))
        bad, closed = await self._store_and_close(usable, now)
        await crashpoints.reach("closer.after_C2", _subject(usable))
        await self._settle(usable, closed)  # C3 and C4
        await crashpoints.reach("closer.after_C4", _subject(usable))
        await self._give_up(usable, [*refused, *bad], now)  # C5
        await crashpoints.reach("closer.after_C5", _subject(usable))
        await self._announce(usable)

    async def set_aside(self, delivery: Delivery, error: Exception) -> None:
        """To the quarantine, with the error that it caused."""
        await self._give_up([], [(delivery, Unusable("internal_error", repr(error)))], self._backends.clock.now())

    # --- reading

    async def _read(self, deliveries: Sequence[Delivery]) -> tuple[list[Read], list[tuple[Delivery, Unusable]]]:
        parsed: list[tuple[Delivery, Message]] = []
        refused: list[tuple[Delivery, Unusable]] = []
        for delivery in deliveries:
            try:
                parsed.append((delivery, parse(delivery.body, self._settings.mq_secret)))
            except Unusable as why:
                refused.append((delivery, why))
        wanted = list({message.execution_id for _, message in parsed})
        rows = await self._rows(wanted)
        usable: list[Read] = []
        for delivery, message in parsed:
            try:
                usable.append(Read(delivery, message, check(message, rows.get(message.execution_id))))
            except Unusable as why:
                refused.append((delivery, why))
        return usable, refused

    # --- C1, C2

    async def _store_and_close(self, usable: Sequence[Read], now: datetime) -> tuple[list[tuple[Delivery, Unusable]], Rows]:
        """Answers what could not be stored, and the rows that this call closed, as they are now."""
        closings = self._closings(usable, now)
        (bad, outcomes), _ = await asyncio.gather(
            self._append_and_close(usable, [change for _, change in closings], now),
            self._commit(self._progress(usable, now)),
        )
        pairs = zip(closings, outcomes, strict=True)
        return bad, {row.id: msgspec.structs.replace(row, **change.set) for (row, change), outcome in pairs if outcome.won}

    async def _commit(self, changes: Sequence[Change]) -> list[Applied]:
        return await self._backends.store.commit(changes) if changes else []

    async def _append_and_close(
        self, usable: Sequence[Read], closing: Sequence[ChangeExecution], now: datetime
    ) -> tuple[list[tuple[Delivery, Unusable]], list[Applied]]:
        """If the store cannot take one line (a bug of ours, a limit of its), only that one is quarantined."""
        pairs = [(read, line_of(read.message, read.row, now, self._settings.max_log_line_bytes)) for read in usable]
        lines = [(read, line) for read, line in pairs if line is not None]
        there = {read.row.id: read.row.log_lines for read, _ in lines}
        limit = self._settings.max_log_lines
        try:
            outcomes = await self._backends.store.append_and_close(
                [line for _, line in lines], closing, max_per_execution=limit, there=there
            )
        except Unavailable:
            raise
        except Exception as error:
            log.warning("a line could not be stored; one by one now", error=repr(error))
            return await self._one_by_one(lines), await self._commit(closing)
        return [], outcomes

    async def _one_by_one(self, lines: Sequence[tuple[Read, LogLine]]) -> list[tuple[Delivery, Unusable]]:
        bad = []
        for read, line in lines:
            try:
                await self._backends.store.append_logs([line], max_per_execution=self._settings.max_log_lines)
            except Unavailable:
                raise
            except Exception as error:
                bad.append((read.delivery, Unusable("not_storable", repr(error))))
        return bad

    def _closings(self, usable: Sequence[Read], now: datetime) -> list[tuple[Execution, ChangeExecution]]:
        """C2: the first terminal message of each open row closes it, from any phase."""
        first: dict[str, Read] = {}
        for read in usable:
            if read.message.type in TERMINAL and read.row.active:
                first.setdefault(read.row.id, read)
        return [(read.row, self._close(read.message, read.row, now)) for read in first.values()]

    def _close(self, message: Message, row: Execution, now: datetime) -> ChangeExecution:
        values: dict[str, Any] = {"exit_code": message.exit_code, "result": message.result, "closed_by": "central"}
        if row.push != "sent":
            values["push"] = "sent"  # whoever reports a result has taken it
        if message.type == "SUCCESS":
            return lifecycle.close(row, "success", now, reason="central control reports success", **values)
        error = error_of(message)
        if message.type == "CANCELED":
            return lifecycle.close(row, "canceled", now, reason="central control confirms the cancel", **values)
        outcome: Outcome = "failed" if message.retryable else "refused"
        values["retryable"] = message.retryable
        return lifecycle.close(row, outcome, now, reason=error.message, error=error, **values)

    def _progress(self, usable: Sequence[Read], now: datetime) -> list[Change]:
        """The latest of each execution; one that is over does not move its task's progress."""
        latest: dict[str, Read] = {}
        for read in usable:
            if read.row.active and (read.message.progress is not None or read.message.step is not None):
                latest[read.row.id] = read
        ended = {read.row.id for read in usable if read.message.type in TERMINAL}
        return [
            lifecycle.progress(read.row.task_id, id, _percent(read.message), _step(read.message), now)
            for id, read in latest.items()
            if id not in ended
        ]

    # --- C3, C4

    async def _settle(self, usable: Sequence[Read], closed: Rows) -> None:
        """Whoever won K1, the task follows and the lock goes; a result that came too late is noted."""
        terminal = [read for read in usable if read.message.type in TERMINAL]
        if not terminal:
            return
        wanted = list({read.row.id for read in terminal} - closed.keys())  # those that others have closed
        rows = closed | await self._rows(wanted)
        if await self._note_late(terminal, rows):
            rows |= await self._rows(list(rows))
        await self._closing.settle(list(rows.values()), just_closed=closed)
        if wanted:
            await self._stay_closed(wanted)

    async def _stay_closed(self, ids: Sequence[str]) -> None:
        """That others have closed these rows was read, perhaps before it was durable. If a failure of the store has taken it
        back, their results are to come again: acknowledged, they would be lost."""
        await self._backends.store.confirm([], [])
        if any(row.active for row in (await self._rows(ids)).values()):
            raise StoreUnavailable("a failure of the store has reopened an execution; its result comes again")

    async def _rows(self, ids: Sequence[str]) -> Rows:
        if not ids:
            return {}
        return {row.id: row for row in await self._backends.store.executions(ids) if row is not None}

    async def _note_late(self, terminal: Sequence[Read], rows: dict[str, Execution]) -> bool:
        """C2 for rows that were closed otherwise. True: rows were changed, read them again."""
        noted = False
        for read in terminal:
            row, word = rows.get(read.row.id), read.message.type
            if row is None or row.active or _agrees(word, row):
                continue
            if word == "SUCCESS" and row.outcome == "timeout":
                if not row.late_success:
                    brought = {"exit_code": read.message.exit_code, "result": read.message.result}
                    await self._backends.store.commit([lifecycle.note_late_success(row, **brought)])
                    noted = True
            else:
                [first] = await self._backends.store.commit([lifecycle.note_late_result(row, word)])
                if first.won:
                    now = self._backends.clock.now()
                    await self._backends.store.commit([lifecycle.late_note(row.task_id, row, word, now)])
                    self._metrics.counts["late_results_total"] += 1
        return noted

    # --- C5

    async def _give_up(self, usable: Sequence[Read], refused: list[tuple[Delivery, Unusable]], now: datetime) -> None:
        if refused:
            await self._backends.store.quarantine([quarantined(delivery, why, now) for delivery, why in refused])
            await self._backends.stream.reject([delivery for delivery, _ in refused])
            self._metrics.counts["quarantined_total"] += len(refused)
            log.warning("messages quarantined", event_name="quarantine", messages=len(refused), first=str(refused[0][1]))
        gone = {delivery.id for delivery, _ in refused}
        await self._backends.stream.ack([read.delivery for read in usable if read.delivery.id not in gone])

    async def _announce(self, usable: Sequence[Read]) -> None:
        """For those who follow a log: there is something new to read."""
        tasks = dict.fromkeys(read.row.task_id for read in usable)
        events: list[Event] = [{"event": "task.log", "task_id": task_id} for task_id in tasks]
        self._closing.announcer.say(events)


_OUTCOME_WORDS = {"success": "SUCCESS", "failed": "FAILURE", "refused": "FAILURE", "canceled": "CANCELED"}


def _agrees(word: str, row: Execution) -> bool:
    """The same result again: a redelivery, nothing to note."""
    return row.outcome is not None and row.closed_by == "central" and _OUTCOME_WORDS.get(row.outcome) == word


def _percent(message: Message) -> int | None:
    return int(message.progress) if message.progress is not None else None


def _step(message: Message) -> str | None:
    return message.step[:200] if message.step is not None else None


def _subject(usable: Sequence[Read]) -> str:
    return crashpoints.subjects(read.row.task_id for read in usable)
