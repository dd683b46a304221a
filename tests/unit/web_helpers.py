"""The web app in tests: on memory or SQLite backends, with a central control that knows `dev-*`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from scriptdispatch.domain.model import Execution
from scriptdispatch.errors import CentralUnavailable
from scriptdispatch.ids import new_id
from scriptdispatch.settings import Settings
from scriptdispatch.web.app import Server, address, bind, create_app
from scriptdispatch.wiring import Backends, connect

API = "/api/v1"
TOKEN = "sd_root_0123456789abcdef0123"
SHELL = {"language": "shell", "content": "echo hello"}


class StubCentral:
    """Knows every device whose id starts with `dev`, and writes down who was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False

    async def device(self, device_id: str) -> dict[str, Any] | None:
        self.asked.append(device_id)
        if self.away:
            raise CentralUnavailable("connection refused")
        return {"id": device_id, "online": True} if device_id.startswith("dev") else None

    async def cancel(self, execution_id: str) -> str:
        return "will_try"

    async def close(self) -> None:
        return None


class Site:
    """A running app: its parts, and a client that speaks to it."""

    def __init__(self, app: FastAPI, backends: Backends, central: StubCentral, client: httpx.AsyncClient) -> None:
        self.app, self.backends, self.central, self.client = app, backends, central, client

    async def ask(self, method: str, path: str, **rest: Any) -> httpx.Response:
        return await self.client.request(method, API + path, **rest)

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.ask("POST", "/tasks", json={"script": SHELL, **body})
        assert answer.status_code == 201, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def stored(self) -> int:
        return sum((await self.backends.store.counts()).values())


def settings_for(kind: str, folder: Path, **rest: Any) -> Settings:
    url = "memory://" if kind == "memory" else f"sqlite:///{folder}/web.db"
    return Settings(store_url=url, **rest)


@contextlib.asynccontextmanager
async def site(kind: str, folder: Path, *, token: str | None = None, **rest: Any) -> AsyncIterator[Site]:
    """In this process, without a socket."""
    settings = settings_for(kind, folder, **{"rate_limit_per_second": 0, **rest})
    backends, central = await connect(settings), StubCentral()
    app = create_app(settings, backends, central)  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        yield Site(app, backends, central, client)
    await backends.close()


@contextlib.asynccontextmanager
async def served(kind: str, folder: Path, *, token: str | None = None, **rest: Any) -> AsyncIterator[Site]:
    """Behind a real server on a free port: for streams and raw sockets."""
    async with site(kind, folder, token=token, port=0, **rest) as inner:
        sock = bind(inner.app.state.parts.settings)
        server = Server(inner.app)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(base_url=address(sock), headers=headers, timeout=20) as client:
            yield Site(inner.app, inner.backends, inner.central, client)
        server.end()
        async with asyncio.timeout(15):
            await running


def execution(web: Site, task_id: str, device_id: str | None = None) -> Execution:
    """A fresh row, as a worker inserts it (W3)."""
    return Execution(
        id=new_id(), task_id=task_id, round=1, device_id=device_id, script_id=None, timeout_seconds=60, worker_id="w1",
        node_id="n1", from_status="waiting", previous_execution_id=None, created_at=web.backends.clock.now(),
    )  # fmt: skip


async def until(condition: Any, within_s: float = 10.0) -> None:
    """Waits for a condition (a function, or a coroutine function) with a deadline."""
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)
