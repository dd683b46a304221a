"""The real API on a SQLite file, served by uvicorn in a thread, for tests of the client and the command line."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from scriptdispatch.central.client import CentralControl
from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.model import LogLine
from scriptdispatch.settings import Settings
from scriptdispatch.web.app import Server, address, bind, create_app
from scriptdispatch.wiring import Backends, connect

T = TypeVar("T")


class Api:
    """`url` is where it listens. `run` does work on its loop, where its backends live."""

    def __init__(self, loop: asyncio.AbstractEventLoop, backends: Backends, url: str, store_url: str) -> None:
        self._loop, self._backends, self.url, self.store_url = loop, backends, url, store_url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    @property
    def backends(self) -> Backends:
        return self._backends

    def says(self, task_id: str, *lines: str, first_seq: int = 1, stream: str = "stdout") -> None:
        """Log lines of the task, as the consumer would store them."""
        now = SystemClock().now()
        rows = [
            LogLine(task_id=task_id, execution_id=f"e-{task_id}", seq=first_seq + i, time=now, stream=stream, content=text)
            for i, text in enumerate(lines)
        ]
        self.run(self.backends.store.append_logs(rows, max_per_execution=1000))
        self.run(self.backends.events.publish([{"event": "task.log", "task_id": task_id}]))


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Api]:
    chosen = Settings(store_url=f"sqlite:///{folder / 'test.db'}", **{"port": 0, "rate_limit_per_second": 0, **settings})
    started = threading.Event()
    told: dict[str, Any] = {}

    async def life() -> None:
        sock = bind(chosen)
        backends = await connect(chosen)
        central = CentralControl(chosen, backends.clock, limit=4)
        server = Server(create_app(chosen, backends, central))
        told.update(loop=asyncio.get_running_loop(), backends=backends, url=address(sock), server=server)
        started.set()
        try:
            await server.serve(sockets=[sock])
        finally:
            sock.close()
            await central.close()
            await backends.close()

    thread = threading.Thread(target=asyncio.run, args=(life(),), daemon=True)
    thread.start()
    assert started.wait(10), "the API did not start"
    try:
        yield Api(told["loop"], told["backends"], told["url"], chosen.store_url)
    finally:
        told["loop"].call_soon_threadsafe(told["server"].end)
        thread.join(10)
        assert not thread.is_alive(), "the API did not end"
