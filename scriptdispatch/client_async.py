"""The client of the API: the one place that speaks HTTP to it. `scriptdispatch.client` is the door; import from there.

Every create carries an Idempotency-Key (a fresh one unless given), so a request whose answer was lost is repeated
without creating anything twice. Streams resume after a broken connection where they stopped: no line lost or doubled.
"""

import asyncio
import json
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

import httpx

from scriptdispatch.client_errors import ApiError, ClientError, Json, Unreachable, WaitTimeout
from scriptdispatch.client_follow import Follow
from scriptdispatch.client_sse import Event

DEFAULT_URL: Final = "http://127.0.0.1:8080"
MAX_BATCH: Final = 1000
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024  # half of what a server takes unless told otherwise
SILENCE_S: Final = 40.0  # a stream sends a comment every 15 s: quiet for longer, it is dead
REPEATS: Final = 3
NO_LINES: Final = 2**62  # a cursor behind every line: who follows from here hears of states only
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class AsyncClient:
    """Talks to one server. Use it as `async with AsyncClient() as client`. `url` and `token` come from
    SCRIPTDISPATCH_URL and SCRIPTDISPATCH_TOKEN unless given. `patience_s`: how long a broken stream tries to come back."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, patience_s: float = 60.0
    ) -> None:
        self.url = (url or os.environ.get("SCRIPTDISPATCH_URL") or DEFAULT_URL).rstrip("/")
        token = token or os.environ.get("SCRIPTDISPATCH_TOKEN")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ClientError(f"SCRIPTDISPATCH_URL must start with http:// or https://, not {self.url!r}")
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # A proxy of the environment is for other machines.
            trust_env=urlsplit(self.url).hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # --- tasks

    async def create(
        self, task: Mapping[str, Any] | None = None, /, *, idempotency_key: str | None = None, **fields: Any
    ) -> Json:
        """Creates a task from a body of SPEC 4.1, given as a mapping or as keywords. Answers the task."""
        body = {**(task or {}), **fields}
        return await self._create("/tasks", body, idempotency_key)

    async def create_many(self, tasks: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Json:
        """Any number of tasks, in requests of at most 1,000. Answers `{"items", "created", "failed"}` over all of them,
        `index` counting from the first. One bad task does not sink the rest. If a later request finds nobody, it raises
        `Unreachable` although earlier ones were stored: repeat the whole with the same key."""
        key = idempotency_key or uuid.uuid4().hex
        whole: Json = {"items": [], "created": 0, "failed": 0}
        for number, chunk in enumerate(chunks(tasks)):
            part = await self.create_batch(chunk, idempotency_key=f"{key}-{number}")
            first = len(whole["items"])
            whole["items"] += [{**item, "index": first + item["index"]} for item in part["items"]]
            whole["created"] += part["created"]
            whole["failed"] += part["failed"]
        return whole

    async def create_batch(self, tasks: list[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Json:
        """At most 1,000 tasks in one request."""
        return await self._create("/tasks/batch", {"tasks": tasks}, idempotency_key)

    async def check(self, task: Mapping[str, Any]) -> Json:
        """A dry run of create: stores nothing."""
        return await self._call("POST", "/tasks/check", body=task)

    async def get(self, task: str) -> Json:
        """The task, by its id or the last 8 or more characters of it."""
        return await self._call("GET", f"/tasks/{_part(task)}")

    async def tasks(self, **filters: Any) -> Json:
        """One page, newest first: `{"items", "next_cursor"}`. Filters as in SPEC 4.3."""
        return await self._call("GET", "/tasks", query=filters)

    async def executions(self, task: str) -> list[Json]:
        return await self._items(f"/tasks/{_part(task)}/executions")

    async def history(self, task: str) -> list[Json]:
        return await self._items(f"/tasks/{_part(task)}/history")

    async def cancel(
        self, task: str, *, reason: str | None = None, force: bool = False, expected_status: str | None = None
    ) -> Json:
        """Asks for the end of the task. `canceled` at once if it was not sent yet; else `cancel_requested` is set, and the
        device may still finish it. `force` ends it here and now."""
        body = {"reason": reason, "expected_status": expected_status}
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", f"/tasks/{_part(task)}/cancel", query={"force": force or None}, body=given)

    async def wait(self, task: str, *, timeout: float | None = None) -> Json:
        """The task as it is when it has reached a final state. Raises `WaitTimeout` after `timeout` seconds."""
        async for _ in self.follow(task, after=NO_LINES, timeout=timeout):
            pass
        return await self.get(task)

    async def log_page(self, task: str, **query: Any) -> Json:
        """One page of the log: `{"items", "next_cursor", "prev_cursor", "total", "dropped"}`."""
        return await self._call("GET", f"/tasks/{_part(task)}/logs", query=query)

    async def logs(
        self,
        task: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        timeout: float | None = None,
        on_reconnect: Callable[[], None] | None = None,
        **query: Any,
    ) -> AsyncGenerator[Json, None]:
        """The log lines in order of arrival, page by page; `follow` goes on with new ones until the task is final, and
        calls `on_reconnect` whenever a broken stream is mended."""
        cursor: Any = None
        page = await self.log_page(task, tail=tail, **query)
        while page["items"]:
            for line in page["items"]:
                yield line
            cursor = page.get("next_cursor")
            if cursor is None or tail is not None:
                break
            page = await self.log_page(task, after=cursor, **query)
        if follow:
            async with aclosing(self.follow(task, after=cursor, timeout=timeout)) as events:
                async for event in events:
                    if event.name == "log" and _wanted(event.data, query):
                        yield event.data
                    elif event.name == "reconnected" and on_reconnect is not None:
                        on_reconnect()

    async def follow(self, task: str, *, after: Any = None, timeout: float | None = None) -> AsyncGenerator[Event, None]:
        """Events `log`, `progress` and `state` until the task is final, `reconnected` after each break that was mended.
        Ends at once when the state is final, with all lines that were there by then."""
        end = None if timeout is None else time.monotonic() + timeout
        stream = Follow(self, task, None if after is None else str(after), self._patience_s)
        async with aclosing(stream.events()) as events:
            while True:
                try:
                    async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())):
                        event = await anext(events, None)
                except TimeoutError:
                    raise WaitTimeout(f"not finished after {timeout:g} s; it goes on") from None
                if event is None:
                    return
                yield event

    # --- devices, cluster, the rest

    async def devices(self, state: str | None = None, **query: Any) -> Json:
        return await self._call("GET", "/devices", query={"state": state, **query})

    async def device(self, device_id: str) -> Json:
        return await self._call("GET", f"/devices/{_part(device_id)}")

    async def unlock(self, device_id: str, *, reason: str, fencing_token: int | None = None) -> Json:
        """Forced release of the device's lock. With `fencing_token` only if its holder is still that one."""
        query = {"reason": reason, "fencing_token": fencing_token}
        return await self._call("DELETE", f"/devices/{_part(device_id)}/lock", query=query)

    async def workers(self) -> list[Json]:
        return await self._items("/workers")

    async def nodes(self) -> list[Json]:
        return await self._items("/nodes")

    async def stats(self, day: str | None = None) -> Json:
        return await self._call("GET", "/stats", query={"day": day})

    async def reconcile(self) -> Json:
        return await self._call("POST", "/reconcile")

    async def tokens(self) -> list[Json]:
        return await self._items("/tokens")

    async def create_token(self, name: str, scopes: list[str], expires_at: str | None = None) -> Json:
        """The answer holds the secret, this once."""
        body: Json = {"name": name, "scopes": scopes}
        return await self._call("POST", "/tokens", body={**body, **({"expires_at": expires_at} if expires_at else {})})

    async def revoke_token(self, token_id: str, *, cancel_tasks: bool = False) -> Json:
        """With `cancel_tasks` also what it created and still waits is canceled: `tasks_canceled` in the answer."""
        return await self._call("DELETE", f"/tokens/{_part(token_id)}", query={"cancel_tasks": cancel_tasks or None})

    async def quarantine(self, **query: Any) -> Json:
        return await self._call("GET", "/quarantine", query=query)

    async def quarantined(self, id: str) -> Json:
        return await self._call("GET", f"/quarantine/{_part(id)}")

    async def replay(self, id: str) -> Json:
        return await self._call("POST", f"/quarantine/{_part(id)}/replay")

    async def unquarantine(self, id: str) -> Json:
        return await self._call("DELETE", f"/quarantine/{_part(id)}")

    async def version(self) -> Json:
        return await self._call("GET", "/version")

    async def ready(self) -> tuple[bool, str]:
        """Whether the server is ready, and its lines about each part."""
        answer = await self._send("GET", "/readyz")
        return answer.is_success, answer.text

    # --- how

    async def _items(self, path: str) -> list[Json]:
        answer = await self._call("GET", path)
        return list(answer["items"])

    async def _create(self, path: str, body: Json, key: str | None) -> Json:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        for left in reversed(range(REPEATS)):
            try:
                return await self._call("POST", path, body=body, headers=headers)
            except Unreachable:
                if not left:
                    raise
            except ApiError as error:
                # The one refusal after which something may be stored: the same key finds out.
                if not left or error.problem.get("outcome") != "unknown":
                    raise
            await asyncio.sleep(0.2)
        raise AssertionError("unreachable: the last repeat returns or raises")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        content = None if body is None else _encode(body)
        sent = {**(headers or {}), **({} if content is None else {"Content-Type": "application/json"})}
        answer = await self._send(method, "/api/v1" + path, params=_query(query), content=content, headers=sent)
        return self._read(answer)

    async def _send(self, method: str, path: str, **given: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **given)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _read(self, answer: httpx.Response) -> Json:
        if answer.status_code == 204:
            return {}
        try:
            value = answer.json()
        except ValueError:
            value = None
        if answer.is_success and isinstance(value, dict):
            return value
        raise self._problem(answer.status_code, value)

    def _problem(self, status: int, value: Any) -> ClientError:
        if isinstance(value, dict) and "code" in value:
            return ApiError({"status": status, **value})
        return Unreachable(f"{self.url} answered {status} and not in the words of this API: is it a scriptdispatch server?")

    def _unreachable(self, error: Exception) -> Unreachable:
        what = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            what = "nobody listens there" if "refused" in what.lower() or "attempts failed" in what else what
        elif isinstance(error, httpx.TimeoutException):
            what = "no answer in time"
        return Unreachable(f"cannot reach {self.url}: {what}")

    async def stream_lines(self, task: str, after: str | None) -> AsyncGenerator[str, None]:
        """The lines of the task's event stream as they come, over one connection."""
        request = self._http.stream(
            "GET",
            f"/api/v1/tasks/{_part(task)}/logs/stream",
            params=_query({"after": after}),
            headers={"Accept": "text/event-stream"},
            timeout=httpx.Timeout(SILENCE_S, connect=5.0),
        )
        try:
            async with request as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self._problem(answer.status_code, _json(answer.content))
                async for line in answer.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise self._unreachable(error) from error


def chunks(tasks: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Groups that a batch request takes: at most 1,000 tasks and 8 MiB."""
    group: list[Mapping[str, Any]] = []
    size = 0
    for task in tasks:
        weight = len(_encode(task))
        if group and (len(group) >= MAX_BATCH or size + weight > MAX_BATCH_BYTES):
            yield group
            group, size = [], 0
        group.append(task)
        size += weight
    if group:
        yield group


def task_ref(text: str) -> str:
    """What people give for a task (an id, the last 8 characters of one, a link to it) as the API takes it."""
    text = text.strip().lower()
    found = _ID.findall(text)
    return found[-1] if found else text.lstrip("….")


def _wanted(line: Json, query: Mapping[str, Any]) -> bool:
    """Whether a streamed line passes the filters that the pages were read with."""
    if query.get("execution_id") and line.get("execution_id") != query["execution_id"]:
        return False
    if query.get("stream") and line.get("stream") != query["stream"]:
        return False
    return not query.get("q") or str(query["q"]).lower() in str(line.get("content", "")).lower()


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ClientError(f"the body cannot be written as JSON: {error}") from None


def _query(values: Mapping[str, Any] | None) -> httpx.QueryParams:
    pairs: list[tuple[str, str | int | float | bool | None]] = []
    for name, value in (values or {}).items():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not None:
                pairs.append((name, str(one).lower() if isinstance(one, bool) else str(one)))
    return httpx.QueryParams(pairs)


def _part(text: str) -> str:
    """A value as one part of a path: it must not become another path."""
    if text in ("", ".", ".."):
        raise ClientError(f"{text!r} is not an id")
    return quote(text, safe="")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
