"""Producing and following tasks from Python.

    from scriptdispatch.client import Client

    with Client() as client:
        task = client.create(name="hello", device_id="dev-001", script={"language": "shell", "content": "echo hello"})
        for line in client.logs(task["id"], follow=True):
            print(line["content"])
        print(client.wait(task["id"])["status"])

`AsyncClient` has the same methods as coroutines. Tasks and all else are the API's JSON as plain dicts. Errors:
`ApiError` (refused, with the API's problem), `Unreachable`, `WaitTimeout`; all are `ClientError`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

from scriptdispatch.client_async import NO_LINES, AsyncClient, chunks, task_ref
from scriptdispatch.client_errors import ApiError, ClientError, Json, Unreachable, WaitTimeout
from scriptdispatch.client_sse import Event

__all__ = [
    "NO_LINES",
    "ApiError",
    "AsyncClient",
    "Client",
    "ClientError",
    "Event",
    "Unreachable",
    "WaitTimeout",
    "chunks",
    "task_ref",
]

T = TypeVar("T")


class Client:
    """The same client for code without an event loop, and also safe to use under a running one: the requests are made on
    a loop of its own, in a thread that `close` ends."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, patience_s: float = 60.0
    ) -> None:
        self._async = AsyncClient(url, token, timeout_s=timeout_s, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scriptdispatch-client", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._async.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._run(self._async.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def create(self, task: Mapping[str, Any] | None = None, /, *, idempotency_key: str | None = None, **fields: Any) -> Json:
        return self._run(self._async.create(task, idempotency_key=idempotency_key, **fields))

    def create_many(self, tasks: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Json:
        return self._run(self._async.create_many(tasks, idempotency_key=idempotency_key))

    def create_batch(self, tasks: list[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Json:
        return self._run(self._async.create_batch(tasks, idempotency_key=idempotency_key))

    def check(self, task: Mapping[str, Any]) -> Json:
        return self._run(self._async.check(task))

    def get(self, task: str) -> Json:
        return self._run(self._async.get(task))

    def tasks(self, **filters: Any) -> Json:
        return self._run(self._async.tasks(**filters))

    def executions(self, task: str) -> list[Json]:
        return self._run(self._async.executions(task))

    def history(self, task: str) -> list[Json]:
        return self._run(self._async.history(task))

    def cancel(
        self, task: str, *, reason: str | None = None, force: bool = False, expected_status: str | None = None
    ) -> Json:
        return self._run(self._async.cancel(task, reason=reason, force=force, expected_status=expected_status))

    def wait(self, task: str, *, timeout: float | None = None) -> Json:
        return self._run(self._async.wait(task, timeout=timeout))

    def log_page(self, task: str, **query: Any) -> Json:
        return self._run(self._async.log_page(task, **query))

    def logs(
        self,
        task: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        timeout: float | None = None,
        on_reconnect: Callable[[], None] | None = None,
        **query: Any,
    ) -> Iterator[Json]:
        """`on_reconnect` is called in the client's thread."""
        source = self._async.logs(task, follow=follow, tail=tail, timeout=timeout, on_reconnect=on_reconnect, **query)
        return self._iterate(source)

    def follow(self, task: str, *, after: Any = None, timeout: float | None = None) -> Iterator[Event]:
        return self._iterate(self._async.follow(task, after=after, timeout=timeout))

    def devices(self, state: str | None = None, **query: Any) -> Json:
        return self._run(self._async.devices(state, **query))

    def device(self, device_id: str) -> Json:
        return self._run(self._async.device(device_id))

    def unlock(self, device_id: str, *, reason: str, fencing_token: int | None = None) -> Json:
        return self._run(self._async.unlock(device_id, reason=reason, fencing_token=fencing_token))

    def workers(self) -> list[Json]:
        return self._run(self._async.workers())

    def nodes(self) -> list[Json]:
        return self._run(self._async.nodes())

    def stats(self, day: str | None = None) -> Json:
        return self._run(self._async.stats(day))

    def reconcile(self) -> Json:
        return self._run(self._async.reconcile())

    def tokens(self) -> list[Json]:
        return self._run(self._async.tokens())

    def create_token(self, name: str, scopes: list[str], expires_at: str | None = None) -> Json:
        return self._run(self._async.create_token(name, scopes, expires_at))

    def revoke_token(self, token_id: str, *, cancel_tasks: bool = False) -> Json:
        return self._run(self._async.revoke_token(token_id, cancel_tasks=cancel_tasks))

    def quarantine(self, **query: Any) -> Json:
        return self._run(self._async.quarantine(**query))

    def quarantined(self, id: str) -> Json:
        return self._run(self._async.quarantined(id))

    def replay(self, id: str) -> Json:
        return self._run(self._async.replay(id))

    def unquarantine(self, id: str) -> Json:
        return self._run(self._async.unquarantine(id))

    def version(self) -> Json:
        return self._run(self._async.version())

    def ready(self) -> tuple[bool, str]:
        return self._run(self._async.ready())

    # --- the bridge

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C here must not leave the request running there
            raise

    def _iterate(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        steps = _Steps(source)
        try:
            while (item := self._run(steps.next())) is not None:
                yield item
        finally:
            self._run(steps.end())


class _Steps(Generic[T]):
    """An async iterator, one step at a time from another thread."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._step: asyncio.Task[Any] | None = None

    async def next(self) -> T | None:
        """The next item, None at the end (`StopAsyncIteration` cannot cross to the other thread)."""
        self._step = asyncio.current_task()
        return await anext(self._source, None)

    async def end(self) -> None:
        """A step that Ctrl-C has left behind must be over before the source can be closed."""
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait((self._step,))
        await self._source.aclose()
