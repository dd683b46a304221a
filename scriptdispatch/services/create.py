"""Creating tasks (SPEC 3.1): validate, ask for the device, check the script, store, push, announce. Web process.

The order is the promise: everything that can refuse a task comes before the one commit that stores it. After the
commit the task is accepted whatever happens: a queue that is down, or a death before the push, is mended by the loader.
"""

import asyncio
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec
from msgspec import Struct

from scriptdispatch import crashpoints, logs
from scriptdispatch.central.client import CentralControl
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import Applied, InsertTask
from scriptdispatch.domain.lanes import QueueStrategy, lane_key
from scriptdispatch.domain.model import WAITING, Priority, Retry, Script, Task
from scriptdispatch.domain.render import MissingParam, render
from scriptdispatch.errors import CentralUnavailable, QueueUnavailable, Refused, SettingsError, Unavailable
from scriptdispatch.ids import new_id
from scriptdispatch.services.bodies import TaskBody, task_body
from scriptdispatch.services.closing import changed, item_of
from scriptdispatch.services.fields import invalid
from scriptdispatch.services.hearsay import tell
from scriptdispatch.services.scripts import Scripts
from scriptdispatch.services.syntax import SyntaxChecker, Verdict
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

FURTHEST = timedelta(days=5 * 366)
DEVICES_AT_ONCE = 32
KeyMaker = Callable[[str, Priority, datetime], str]
log = logs.get("create")


class Draft(Struct, kw_only=True):
    """A body that passed the checks which ask nobody."""

    body: TaskBody
    script: Script | None
    due_at: datetime
    rendered: str = ""


class Creator:
    def __init__(self, settings: Settings, backends: Backends, central: CentralControl, scripts: Scripts) -> None:
        self._settings, self._backends, self._central, self._scripts = settings, backends, central, scripts
        self._syntax = SyntaxChecker()
        self._lane_key = key_maker(settings.queue_strategy)

    async def create(self, body: Any, actor: str, *, id: str | None = None, repeat: bool = False) -> Task:
        """The stored task, or `Refused`, and then nothing was stored."""
        answer = (await self.create_many([body], actor, ids=None if id is None else [id], repeat=repeat))[0]
        if isinstance(answer, Refused):
            raise answer
        return answer

    async def create_many(
        self, bodies: Sequence[Any], actor: str, *, ids: Sequence[str] | None = None, repeat: bool = False
    ) -> list[Task | Refused]:
        """One answer per body, in their order; all that pass are stored by one commit. With `ids` given a repeated call
        creates nothing twice; `repeat` says that an earlier one may have stored some: those are answered as they are."""
        ids = ids if ids is not None else [new_id() for _ in bodies]
        answers: dict[int, Task | Refused] = {}
        if repeat:
            await self._backends.store.confirm([], [])  # what it had stored when it died may not have been durable
            stored = await self._backends.store.tasks(ids, settled=True)
            answers = {index: task for index, task in enumerate(stored) if task is not None}
        drafts = await self._checked({i: body for i, body in enumerate(bodies) if i not in answers}, answers)
        now = self._backends.clock.now()
        tasks = {index: self._task(ids[index], draft, actor, now) for index, draft in drafts.items()}
        inserts = [lifecycle.create(task, drafts[index].script) for index, task in tasks.items()]
        # A key is nobody else's only once it is durable. The others are pushed before they are: what workers make of a task
        # is durable only if the task is.
        soon = all(task.dedupe_key is None for task in tasks.values())
        outcomes = await self._store(tasks, inserts, answers, soon)
        new = self._new(answers, set(tasks) | ({*answers} if repeat else set()))
        await self._queue(new, answers, now)
        if soon:
            await self._backends.store.confirm(inserts, outcomes)
        await self._announce([cast(Task, answers[index]) for index in sorted(new)])
        return [answers[index] for index in range(len(bodies))]

    async def check(self, body: Any) -> dict[str, Any]:
        """A dry run: what create would make of this body. Stores nothing. A wrong syntax or an unknown device is part of
        the answer, a wrong field is refused as create refuses it."""
        draft = await self._draft_one(body)
        verdict = await self._syntax.verdict(draft.script.language if draft.script else "", draft.rendered)
        device: dict[str, Any] | None = None
        refusal: Refused | None = None
        if draft.body.device_id is not None:
            try:
                device = await self._ask_device(draft.body.device_id)
            except Refused as error:
                refusal = error
        return {"draft": draft, "verdict": verdict, "device": device, "refusal": refusal}

    # --- the checks, cheapest first

    async def _checked(self, bodies: Mapping[int, Any], answers: dict[int, Task | Refused]) -> dict[int, Draft]:
        drafts = await self._drafts(bodies, answers)
        for step in (self._check_devices, self._check_scripts):
            for index, refusal in (await step(drafts)).items():
                answers[index] = refusal
                del drafts[index]
        return drafts

    async def _draft_one(self, body: Any) -> Draft:
        answers: dict[int, Task | Refused] = {}
        drafts = await self._drafts({0: body}, answers)
        if (refusal := answers.get(0)) is not None:
            raise cast(Refused, refusal)
        return drafts[0]

    async def _drafts(self, bodies: Mapping[int, Any], answers: dict[int, Task | Refused]) -> dict[int, Draft]:
        now = self._backends.clock.now()
        parsed: dict[int, TaskBody] = {}
        for index, body in bodies.items():
            try:
                parsed[index] = self._within_limits(task_body(body), now)
            except Refused as refusal:
                answers[index] = refusal
        known = await self._known_scripts([body.script_id for body in parsed.values() if body.script_id])
        drafts = {}
        for index, body in parsed.items():
            try:
                drafts[index] = _draft(body, known, now)
            except Refused as refusal:
                answers[index] = refusal
        return drafts

    def _within_limits(self, body: TaskBody, now: datetime) -> TaskBody:
        if body.due is not None and body.due > now + FURTHEST:
            raise invalid("run_at", "is more than 5 years ahead")
        if body.script is not None and len(body.script.content.encode()) > self._settings.max_script_bytes:
            raise invalid("script.content", f"is longer than {self._settings.max_script_bytes} bytes")
        if body.params is not None and len(msgspec.json.encode(body.params)) > self._settings.max_params_bytes:
            raise invalid("params", f"are longer than {self._settings.max_params_bytes} bytes")
        for name in body.secret_params:
            if body.params is None or name not in body.params:
                raise invalid("secret_params", f"params has no {name[:100]!r}")
        return body

    async def _known_scripts(self, ids: Sequence[str]) -> dict[str, Script]:
        if not ids:
            return {}
        distinct = list(dict.fromkeys(ids))
        found = await self._backends.store.scripts(distinct)
        return {id: script for id, script in zip(distinct, found, strict=True) if script is not None}

    async def _check_devices(self, drafts: Mapping[int, Draft]) -> dict[int, Refused]:
        """Each distinct device is asked for once."""
        devices = {draft.body.device_id for draft in drafts.values() if draft.body.device_id is not None}
        slots = asyncio.Semaphore(DEVICES_AT_ONCE)

        async def ask(device_id: str) -> tuple[str, Refused | None]:
            async with slots:
                try:
                    await self._ask_device(device_id)
                except Refused as refusal:
                    return device_id, refusal
                return device_id, None

        verdicts = dict(await asyncio.gather(*(ask(device) for device in devices)))
        return {
            i: refusal for i, draft in drafts.items() if (refusal := verdicts.get(draft.body.device_id or "")) is not None
        }

    async def _ask_device(self, device_id: str) -> dict[str, Any]:
        try:
            device = await self._central.device(device_id)
        except CentralUnavailable as error:
            detail = f"central control cannot say whether device {device_id} exists: {error}. Nothing was stored; try again"
            raise Refused(503, "central_unavailable", detail, [("device_id", "could not be checked")]) from error
        if device is None:
            detail = f"central control does not know device {device_id}"
            raise Refused(422, "device_not_found", detail, [("device_id", detail)])
        return device

    async def _check_scripts(self, drafts: Mapping[int, Draft]) -> dict[int, Refused]:
        texts = {(d.script.language, d.rendered) for d in drafts.values() if d.script is not None}
        found = await asyncio.gather(*(self._syntax.verdict(language, text) for language, text in texts))
        verdicts = dict(zip(texts, found, strict=True))
        refused = {}
        for index, draft in drafts.items():
            verdict = verdicts[(draft.script.language, draft.rendered)] if draft.script else Verdict(None)
            if verdict.ok is False:
                refused[index] = bad_syntax(verdict, secret=bool(draft.body.secret_params))
        return refused

    # --- storing

    def _task(self, id: str, draft: Draft, actor: str, now: datetime) -> Task:
        body, due_at = draft.body, max(draft.due_at, now)
        return Task(
            id=id,
            name=body.name or (f"script on {body.device_id}" if body.device_id else "script"),
            type=body.type,
            device_id=body.device_id,
            script_id=draft.script.id if draft.script else None,
            params=body.params,
            secret_params=list(dict.fromkeys(body.secret_params)),
            priority=body.priority,
            run_at=body.due,
            timeout_seconds=body.timeout_seconds or self._settings.execution_timeout,
            retry=body.retry.record() if body.retry else Retry(),
            dedupe_key=body.dedupe_key,
            labels=body.labels,
            lane_key=self._lane_key(id, body.priority, due_at),
            next_run_at=due_at,
            queued=self._goes_now(due_at, now),
            created_by=actor,
            created_at=now,
            updated_at=now,
        )

    def _goes_now(self, due_at: datetime, now: datetime) -> bool:
        """Due before the load after next: pushed at once. Later ones are left to the loader."""
        return due_at <= now + timedelta(seconds=2 * self._settings.load_interval)

    async def _store(
        self, tasks: Mapping[int, Task], inserts: Sequence[InsertTask], answers: dict[int, Task | Refused], soon: bool
    ) -> list[Applied]:
        if not tasks:
            return []
        outcomes = await self._backends.store.commit(inserts, soon=soon)
        for (index, task), insert, outcome in zip(tasks.items(), inserts, outcomes, strict=True):
            answers[index] = task if outcome.won else _duplicate(task, outcome)
            if outcome.won and insert.script is not None:
                self._scripts.keep(insert.script)
        # Dying from here on loses nothing: the loader finds what is stored and not queued (R5).
        if crashpoints.ENABLED:
            for task in tasks.values():
                await crashpoints.reach("web.after_insert", task.id)
        return outcomes

    def _new(self, answers: Mapping[int, Task | Refused], indexes: set[int]) -> dict[int, Task]:
        return {i: t for i in indexes if isinstance(t := answers[i], Task) and t.status == WAITING and t.attempt == 0}

    async def _queue(self, new: Mapping[int, Task], answers: dict[int, Task | Refused], now: datetime) -> None:
        due = {i: t for i, t in new.items() if t.next_run_at is not None and self._goes_now(t.next_run_at, now)}
        if not due:
            return
        try:
            await self._backends.queue.push([msgspec.structs.replace(item_of(t), told=tell(t)) for t in due.values()])
        except QueueUnavailable as error:
            log.warning("the queue does not answer; the loader will bring these tasks", event_name="create.unqueued",
                         tasks=len(due), error=str(error))  # fmt: skip
            await self._unqueued(due, answers)

    async def _announce(self, tasks: Sequence[Task]) -> None:
        """Best effort: whoever misses it looks at the store by itself."""
        try:
            await self._backends.events.publish([{**changed(task), "event": "task.created"} for task in tasks])
        except QueueUnavailable as error:
            log.debug("events were not announced", event_name="events.lost", count=len(tasks), error=str(error))

    async def _unqueued(self, due: Mapping[int, Task], answers: dict[int, Task | Refused]) -> None:
        for index, task in due.items():
            answers[index] = msgspec.structs.replace(task, queued=False)
        try:
            await self._backends.store.commit([lifecycle.mark_unqueued(task) for task in due.values()])
        except Unavailable as error:
            # The row claims to be queued, which is only a hint for readers: the task is stored and will be found.
            log.warning("could not note that tasks are not queued", event_name="create.unqueued", error=str(error))


def _draft(body: TaskBody, known: Mapping[str, Script], now: datetime) -> Draft:
    script = known.get(body.script_id) if body.script_id else make_script(body, now)
    if script is None:
        raise invalid("script_id", f"there is no script {body.script_id}")
    if not script.content.strip():
        raise Refused(422, "invalid_script", "the script is empty", [("script.content", "must not be empty")])
    try:
        rendered = render(script.content, body.params)
    except MissingParam as error:
        raise invalid(f"params.{error.name}", str(error)) from None
    return Draft(body=body, script=script, due_at=body.due or now, rendered=rendered)


def make_script(body: TaskBody, now: datetime) -> Script | None:
    if body.script is None:
        return None
    language, content = body.script.language, body.script.content
    return Script(
        id=hashlib.sha256(f"{language}\0{content}".encode()).hexdigest(),
        language=language,
        content=content,
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        created_at=now,
    )


def bad_syntax(verdict: Verdict, *, secret: bool) -> Refused:
    """With secret params in the text only the line is told: the checker's words quote the script."""
    told = f"syntax error in line {verdict.line}" if verdict.line else "syntax error"
    message = told if secret or not verdict.message else verdict.message
    return Refused(
        422, "invalid_script", f"the script is not valid: {message}", [("script.content", message)], line=verdict.line
    )


def _duplicate(task: Task, outcome: Applied) -> Refused:
    detail = f"task {outcome.holder} has the dedupe_key {task.dedupe_key!r} already"
    return Refused(409, "duplicate_task", detail, [("dedupe_key", detail)], existing_id=outcome.holder)


def key_maker(strategy: str) -> KeyMaker:
    """`priority`, `fifo`, or `module:function` taking (task id, priority, due time) and answering the sortable key."""
    if strategy in ("priority", "fifo"):
        known = cast(QueueStrategy, strategy)
        return lambda id, priority, due_at: lane_key(id, priority, due_at, known)
    module, _, name = strategy.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"queue_strategy {strategy!r} cannot be loaded: {error}") from error
    return cast(KeyMaker, found)
