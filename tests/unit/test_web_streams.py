"""Server-sent events: a task's log as it comes, resumed where it broke off; and the events of the whole system."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import InsertExecution
from scriptdispatch.domain.model import LogLine
from scriptdispatch.web import hub as hubs
from scriptdispatch.web import sse
from tests.unit.web_helpers import API, Site, execution, served, until


@pytest.fixture(params=["memory", "sqlite"])
async def web(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with served(request.param, tmp_path) as found:
        yield found


class Reader:
    """The events of one stream: (event, id, data)."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, str | None, Any]:
        event, id, data = "", None, None
        async with asyncio.timeout(10):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "id":
                    id = value
                elif name == "data":
                    data = json.loads(value)
                elif not line and event:
                    return event, id, data
        raise EOFError

    async def only(self, kind: str) -> tuple[str | None, Any]:
        """The next one of a kind."""
        while True:
            event, id, data = await self.next()
            if event == kind:
                return id, data

    async def rest(self) -> list[tuple[str, str | None, Any]]:
        found = []
        try:
            while True:
                found.append(await self.next())
        except EOFError:
            return found


async def say(web: Site, task_id: str, *numbers: int) -> None:
    now = web.backends.clock.now()
    lines = [
        LogLine(task_id=task_id, execution_id="e", seq=n, time=now, stream="stdout", content=f"line {n}") for n in numbers
    ]
    await web.backends.store.append_logs(lines, max_per_execution=1000)
    await web.backends.events.publish([{"event": "task.log", "task_id": task_id}])


async def test_lines_progress_and_states_come_as_they_happen_and_it_ends_after_the_end(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sse.LINGER_S == 3.0
    monkeypatch.setattr(sse, "LINGER_S", 1.0)
    monkeypatch.setattr(sse, "SAFETY_S", 0.2)
    task = await web.create()
    path = f"{API}/tasks/{task['id']}/logs/stream"
    await say(web, task["id"], 1, 2)
    async with web.client.stream("GET", path) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = Reader(response)
        assert [(await reader.only("log"))[1]["content"] for _ in range(2)] == ["line 1", "line 2"]
        assert (await reader.only("state"))[1]["status"] == "waiting"
        await say(web, task["id"], 3)
        last_id, line = await reader.only("log")
        assert line["content"] == "line 3"
        row = execution(web, task["id"])
        await web.backends.store.commit([InsertExecution(execution=row)])
        [stored] = await web.backends.store.tasks([task["id"]])
        assert stored is not None
        await web.backends.store.commit([lifecycle.start(stored, row, web.backends.clock.now())])
        assert (await reader.only("state"))[1]["status"] == "running"
        await web.backends.store.commit([lifecycle.progress(task["id"], row.id, 40, "unpacking", web.backends.clock.now())])
        assert (await reader.only("progress"))[1] == {"progress": 40, "step": "unpacking"}
        assert (await web.ask("DELETE", f"/tasks/{task['id']}")).status_code == 200
        assert (await reader.only("state"))[1]["status"] == "canceled"
        await say(web, task["id"], 4)  # a line that comes just after the end
        rest = await reader.rest()
    assert [event for event, _, _ in rest] == ["log", "end"]
    end_id = rest[-1][1]
    assert last_id is not None
    assert end_id is not None
    assert int(end_id) > int(last_id)
    resumed = await web.client.get(path, headers={"Last-Event-ID": end_id})
    assert resumed.status_code == 204
    assert (await web.client.get(path, params={"after": end_id})).status_code == 204


@pytest.mark.parametrize("by", ["header", "after"])
async def test_a_broken_stream_is_resumed_without_gap_or_repeat(web: Site, by: str) -> None:
    task = await web.create()
    path = f"{API}/tasks/{task['id']}/logs/stream"
    await say(web, task["id"], *range(1, 6))
    async with web.client.stream("GET", path) as response:
        reader = Reader(response)
        ids = [(await reader.only("log"))[0] for _ in range(3)]
    how: dict[str, Any] = {"headers": {"Last-Event-ID": ids[-1]}} if by == "header" else {"params": {"after": ids[-1]}}
    async with web.client.stream("GET", path, **how) as response:
        reader = Reader(response)
        assert [(await reader.only("log"))[1]["seq"] for _ in range(2)] == [4, 5]
        await say(web, task["id"], 6)
        assert (await reader.only("log"))[1]["seq"] == 6


async def test_a_lost_event_delays_a_line_and_loses_nothing(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await web.create()
    async with web.client.stream("GET", f"{API}/tasks/{task['id']}/logs/stream") as response:
        reader = Reader(response)
        await reader.only("state")
        line = LogLine(
            task_id=task["id"], execution_id="e", seq=1, time=web.backends.clock.now(), stream="stdout", content="unheard"
        )
        await web.backends.store.append_logs([line], max_per_execution=10)  # nobody announces it
        assert (await reader.only("log"))[1]["content"] == "unheard"


async def test_a_quiet_stream_says_that_it_lives(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "COMMENT_S", 0.05)
    monkeypatch.setattr(sse, "SAFETY_S", 0.05)
    task = await web.create()
    for path in (f"{API}/tasks/{task['id']}/logs/stream", f"{API}/events"):
        async with web.client.stream("GET", path) as response, asyncio.timeout(10):
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    break


@pytest.mark.parametrize("after", ["x", "-1", "9" * 30])
async def test_a_cursor_that_is_none_is_refused(web: Site, after: str) -> None:
    task = await web.create()
    path = f"{API}/tasks/{task['id']}/logs/stream"
    assert (await web.client.get(path, params={"after": after})).status_code == 422
    assert (await web.client.get(path, headers={"Last-Event-ID": after})).status_code == 422
    assert (await web.ask("GET", f"/tasks/{'0' * 36}/logs/stream")).status_code == 404


async def test_events_tell_what_happens_from_now_on_but_not_our_own_signals(web: Site) -> None:
    async with web.client.stream("GET", f"{API}/events") as response:
        reader = Reader(response)
        await until(lambda: web.app.state.parts.hub._pump is not None)
        await listening(web)
        await web.backends.events.publish([{"event": "task.log", "task_id": "x"}])
        task = await web.create(name="seen")
        event, _, data = await reader.next()
        assert (event, data["task_id"], data["status"]) == ("task.created", task["id"], "waiting")
        await web.ask("DELETE", f"/tasks/{task['id']}")
        event, _, data = await reader.next()
        assert (event, data["status"]) == ("task.changed", "canceled")
        assert data["at"].endswith("Z")
        assert data["at"] == (await web.ask("GET", f"/tasks/{task['id']}")).json()["updated_at"], "one format of times"


async def listening(web: Site) -> None:
    """Until the hub hears the bus: it begins with the first step of its iterator."""
    heard = web.app.state.parts.hub
    seen: list[Any] = []
    original = heard._hear

    def hear(event: Any) -> None:
        seen.append(event)
        if event.get("event") != "test.ping":
            original(event)

    heard._hear = hear

    async def pinged() -> bool:
        await web.backends.events.publish([{"event": "test.ping"}])
        return bool(seen)

    await until(pinged)
    await asyncio.sleep(0)
    heard._hear = lambda event: None if event.get("event") == "test.ping" else original(event)


async def test_a_batch_holds_the_latest_of_each_changed_task(web: Site) -> None:
    async with web.client.stream("GET", f"{API}/events?batch=200") as response:
        reader = Reader(response)
        await listening(web)
        events = [{"event": "task.changed", "task_id": f"t{n % 3}", "status": f"s{n}"} for n in range(30)]
        await web.backends.events.publish([*events, {"event": "worker.up", "worker_id": "w"}])
        event, _, data = await reader.next()
        assert event == "batch"
        assert {row["task_id"]: row["status"] for row in data["tasks"]} == {"t0": "s27", "t1": "s28", "t2": "s29"}
        assert [row["event"] for row in data["events"]] == ["worker.up"]
        assert (data["more"], data["reset"]) == (False, False)
    for wrong in ("0", "x", "-5"):
        assert (await web.ask("GET", f"/events?batch={wrong}")).status_code == 422


def test_a_batch_of_very_many_says_that_there_are_more() -> None:
    merged = sse.merge([{"event": "task.changed", "task_id": str(n)} for n in range(500)])
    assert (len(merged["tasks"]), merged["more"]) == (200, True)
    assert sse.merge([{"event": "reset"}])["reset"] is True


async def test_a_slow_reader_is_told_to_look_again_and_memory_is_bounded() -> None:
    watch = hubs.Watch(None)
    for number in range(hubs.BUFFER * 3):
        watch.put({"event": "task.changed", "task_id": str(number)})
    assert len(watch.events) <= hubs.BUFFER + 1
    assert watch.events[0] == {"event": "reset"}


async def test_the_hub_listens_only_while_a_stream_is_open_and_bounds_their_number(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = web.app.state.parts.hub
    assert hub._pump is None
    monkeypatch.setattr(hubs, "STREAMS", 1)
    async with web.client.stream("GET", f"{API}/events"):
        await until(lambda: hub._pump is not None)
        refused = await web.ask("GET", "/events")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    await until(lambda: hub._pump is None)
