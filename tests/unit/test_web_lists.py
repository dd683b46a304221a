"""`GET /tasks` with its filters and cursors, ids by their tail, devices, nodes, stats and the rest that is read."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from scriptdispatch.domain.changes import InsertExecution
from scriptdispatch.domain.model import LogLine, NodeRecord, Quarantined, WorkerRecord
from scriptdispatch.ids import new_id
from scriptdispatch.locks.port import Claim
from scriptdispatch.metrics import Metrics
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.views import node_view
from tests.unit.web_helpers import Site, execution, site


@pytest.fixture(params=["memory", "sqlite"])
async def web(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with site(request.param, tmp_path) as found:
        await found.backends.locks.set_intact()
        yield found


async def names(web: Site, **params: Any) -> list[str]:
    answer = await web.ask("GET", "/tasks", params=params)
    assert answer.status_code == 200, answer.text
    return [item["name"] for item in answer.json()["items"]]


async def test_each_filter_finds_what_it_names_and_all_must_hold(web: Site) -> None:
    a = await web.create(name="a", device_id="dev-1", priority="high", labels={"site": "sh-1", "os": "linux"})
    b = await web.create(name="b", device_id="dev-2", labels={"site": "sh-1"}, dedupe_key="only-b")
    c = await web.create(name="c")
    await web.ask("DELETE", f"/tasks/{c['id']}")
    assert await names(web) == ["c", "b", "a"]
    assert await names(web, status="canceled") == ["c"]
    assert await names(web, status="waiting,canceled") == ["c", "b", "a"]
    assert await names(web, ids=f"{a['id']},{c['id']}") == ["c", "a"]
    assert await names(web, device_id="dev-2") == ["b"]
    assert await names(web, type="script", priority="high") == ["a"]
    assert await names(web, label="site:sh-1") == ["b", "a"]
    assert await names(web, label=["site:sh-1", "os:linux"]) == ["a"]
    assert await names(web, error_code="CANCELED") == ["c"]
    assert await names(web, dedupe_key="only-b") == ["b"]
    assert await names(web, created_after="2020-01-01T00:00:00Z", created_before=b["created_at"]) in (["a"], [])
    assert await names(web, created_before="2020-01-01T00:00:00Z") == []
    assert await names(web, device_id="dev-2", priority="high") == []


async def test_pages_follow_their_cursor_without_gap_or_repeat(web: Site) -> None:
    for number in range(7):
        await web.create(name=f"t{number}")
    seen: list[str] = []
    cursor: str | None = None
    while True:
        answer = (await web.ask("GET", "/tasks", params={"limit": 3, **({"cursor": cursor} if cursor else {})})).json()
        seen += [item["name"] for item in answer["items"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
        await web.create(name="newer")  # what comes meanwhile does not shift the pages
    assert seen == [f"t{number}" for number in reversed(range(7))]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=501", "limit=x", "status=done", "priority=urgent", "label=x", "label=:v", "cursor=x",
     "created_after=yesterday", "created_before=2026-01-01T00:00:00", "parent_id=x", "schedule_id=x", "offset=1"],
)  # fmt: skip
async def test_a_wrong_filter_is_named(web: Site, query: str) -> None:
    answer = await web.ask("GET", f"/tasks?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == query.partition("=")[0]


async def test_more_than_100_ids_are_refused(web: Site) -> None:
    answer = await web.ask("GET", "/tasks", params={"ids": ",".join(new_id() for _ in range(101))})
    assert answer.json()["errors"][0]["field"] == "ids"


async def test_lists_go_without_the_scripts_content_and_a_single_task_with_it(web: Site) -> None:
    task = await web.create()
    assert task["script"]["content"] == "echo hello"
    [item] = (await web.ask("GET", "/tasks")).json()["items"]
    assert "script" not in item
    assert item["script_id"] == task["script_id"]


async def test_an_id_may_be_given_by_its_last_characters(web: Site) -> None:
    task = await web.create()
    tail = task["id"][-8:]
    assert (await web.ask("GET", f"/tasks/{tail}")).json()["id"] == task["id"]
    assert (await web.ask("GET", f"/tasks/{tail.upper()}/history")).status_code == 200
    for wrong in (tail[1:], "ffffffff" if tail != "ffffffff" else "eeeeeeee", "%25%25%25%25%25%25%25%25", "________"):
        answer = await web.ask("GET", f"/tasks/{wrong}")
        assert (answer.status_code, answer.json()["code"]) == (404, "task_not_found")
    assert (await web.ask("DELETE", f"/tasks/{tail}")).json()["status"] == "canceled"


async def test_a_tail_of_several_tasks_is_refused_and_names_them(web: Site) -> None:
    creator = web.app.state.parts.creator
    twins = [f"01a1eec7-a56d-7{n}00-b221-5e5bd32755bf" for n in range(2)]
    for id in twins:
        await creator.create({"script": {"language": "shell", "content": "true"}}, "me", id=id)
    answer = await web.ask("POST", f"/tasks/{twins[0][-12:]}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (409, "illegal_state")
    assert sorted(answer.json()["candidates"]) == twins
    assert (await web.ask("GET", f"/tasks/{twins[0]}")).json()["status"] == "waiting"


async def test_log_pages_lead_forward_backward_and_from_the_end(web: Site) -> None:
    task = await web.create()
    now = web.backends.clock.now()
    row = execution(web, task["id"])
    await web.backends.store.commit([InsertExecution(execution=row)])
    lines = [
        LogLine(task_id=task["id"], execution_id=row.id, seq=n, time=now, stream="stderr" if n % 5 == 0 else "stdout",
                content=f"line {n}")
        for n in range(10)
    ]  # fmt: skip
    await web.backends.store.append_logs(lines, max_per_execution=100)
    path = f"/tasks/{task['id']}/logs"

    async def page(**params: Any) -> tuple[list[int], dict[str, Any]]:
        body = (await web.ask("GET", path, params=params)).json()
        return [item["seq"] for item in body["items"]], body

    seen, first = await page(limit=4)
    assert (seen, first["total"], first["dropped"]) == ([0, 1, 2, 3], 10, 0)
    assert (await page(limit=4, after=first["next_cursor"]))[0] == [4, 5, 6, 7]
    seen, last = await page(tail=3)
    assert seen == [7, 8, 9]
    assert (await page(limit=3, before=last["prev_cursor"]))[0] == [4, 5, 6]
    seen, none = await page(after=last["next_cursor"])
    assert (seen, none["next_cursor"]) == ([], last["next_cursor"])
    assert (await page(stream="stderr"))[0] == [0, 5]
    assert (await page(q="line 7"))[0] == [7]
    assert (await page(execution_id="other"))[0] == []
    text = (await web.ask("GET", path + "/download")).text.splitlines()
    assert len(text) == 10
    assert text[0] == f"{format_time(now)} stderr line 0"
    for wrong in ("after=-1", "after=x", "tail=0", "limit=0", "tail=3&after=1", "q=", "foo=1"):
        assert (await web.ask("GET", f"{path}?{wrong}")).status_code == 422


async def test_devices_show_their_lock_and_lane(web: Site) -> None:
    task = await web.create(device_id="dev-1")
    holder = new_id()
    claim = Claim(device_id="dev-2", execution_id=holder, task_id=task["id"], ttl_s=60)
    await web.backends.locks.acquire([claim])
    items = (await web.ask("GET", "/devices")).json()["items"]
    assert [(item["id"], item["waiting"], item["lock"] is not None) for item in items] == [
        ("dev-1", 1, False), ("dev-2", 0, True),
    ]  # fmt: skip
    assert [i["id"] for i in (await web.ask("GET", "/devices?state=busy")).json()["items"]] == ["dev-2"]
    assert [i["id"] for i in (await web.ask("GET", "/devices?state=waiting")).json()["items"]] == ["dev-1"]
    page = (await web.ask("GET", "/devices?limit=1")).json()
    assert [i["id"] for i in (await web.ask("GET", f"/devices?cursor={page['next_cursor']}")).json()["items"]] == ["dev-2"]
    one = (await web.ask("GET", "/devices/dev-1")).json()
    assert one["lane"] == [{"task_id": task["id"], "position": 1}]
    lock = (await web.ask("GET", "/devices/dev-2")).json()["lock"]
    assert (lock["execution_id"], lock["task_id"]) == (holder, task["id"])
    unknown = await web.ask("GET", "/devices/ghost")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "device_not_found")
    web.central.away = True
    assert (await web.ask("GET", "/devices/dev-1")).json()["central"] is None


async def test_a_forced_release_needs_a_reason_and_a_lock(web: Site) -> None:
    for query in ("", "?reason=", "?reason=%20", "?reason=x&fencing_token=y"):
        assert (await web.ask("DELETE", f"/devices/dev-1/lock{query}")).status_code == 422
    answer = await web.ask("DELETE", "/devices/dev-1/lock?reason=stuck")
    assert (answer.status_code, answer.json()["code"]) == (404, "lock_not_found")


def node(web: Site, *, load: int = 0) -> NodeRecord:
    now = web.backends.clock.now()
    worker = WorkerRecord(
        id="w1", name="w1", node_id="n1", pid=2, status="ready", capacity=4, load=load, task_types=None,
        last_heartbeat_at=now, started_at=now,
    )  # fmt: skip
    metrics = Metrics()
    metrics.finish("script", "failed", "TIMEOUT")
    metrics.observe("push", 30)
    metrics.tick_lag["check"] = 0.25
    return NodeRecord(
        id="n1", name="node-1", pid=1, version="1", started_at=now, last_heartbeat_at=now, workers=[worker], consumers=1,
        consumer_lag=3, metrics=metrics.snapshot(),
    )  # fmt: skip


async def test_nodes_workers_readiness_and_metrics_show_what_heartbeats_carry(web: Site) -> None:
    assert (await web.client.get("/readyz")).text.splitlines()[4].startswith("leader failed")
    await web.backends.leases.beat(node(web), 60)
    await web.backends.leases.lead("n1", 60)
    [shown] = (await web.ask("GET", "/nodes")).json()["items"]
    assert (shown["leader"], shown["workers"], shown["consumer_lag"], shown["breaker"]) == (True, 1, 3, "closed")
    [worker] = (await web.ask("GET", "/workers")).json()["items"]
    assert (worker["id"], worker["status"], worker["capacity"]) == ("w1", "ready", 4)
    assert node_view(node(web), alive=False, leader=None, breaker="closed")["workers"] == 0, "they end with their master"
    ready = await web.client.get("/readyz")
    assert ready.status_code == 200
    assert "leader ok node-1 term 1" in ready.text
    text = (await web.client.get("/metrics")).text
    for line in (
        'scriptdispatch_finished_total{code="TIMEOUT",status="failed",type="script"} 1.0',
        'scriptdispatch_phase_seconds_bucket{le="0.05",phase="push"} 1.0',
        'scriptdispatch_phase_seconds_count{phase="push"} 1.0',
        'scriptdispatch_workers{status="ready"} 1.0',
        'scriptdispatch_tick_lag_seconds{timer="check"} 0.25',
        "scriptdispatch_leader 1.0",
        "scriptdispatch_consumer_lag 3.0",
        "scriptdispatch_breaker_open 0.0",
        "scriptdispatch_quarantined_total 0.0",
        'scriptdispatch_tasks{status="waiting"} 0.0',
    ):
        assert line in text


async def test_a_task_says_why_it_waits(web: Site) -> None:
    alone = await web.create()
    assert alone["waiting_for"]["reason"] == "worker"
    await web.backends.leases.beat(node(web), 60)
    first, second = await web.create(device_id="dev-1"), await web.create(device_id="dev-1")
    assert first["waiting_for"] is None
    assert (second["waiting_for"]["reason"], second["waiting_for"]["position"]) == ("device", 2)
    later = format_time(web.backends.clock.now() + timedelta(hours=1))
    timed = await web.create(run_at=later)
    assert (timed["waiting_for"]["reason"], timed["waiting_for"]["until"]) == ("due_time", later)
    listed = {i["id"]: i["waiting_for"] for i in (await web.ask("GET", "/tasks")).json()["items"]}
    assert listed[second["id"]]["position"] == 2
    await web.backends.leases.beat(node(web, load=4), 60)
    assert (await web.ask("GET", f"/tasks/{alone['id']}")).json()["waiting_for"]["reason"] == "worker"


async def test_stats_count_what_is_there(web: Site) -> None:
    await web.create(priority="high")
    task = await web.create()
    await web.ask("DELETE", f"/tasks/{task['id']}")
    stats = (await web.ask("GET", "/stats")).json()
    assert (stats["counts"]["waiting"], stats["counts"]["canceled"]) == (1, 1)
    assert stats["ready"] == {"high": 1, "normal": 0, "low": 0}
    for day in ("2026-11-18", "2020-02-29"):
        assert (await web.ask("GET", f"/stats?day={day}")).status_code == 200
    for day in ("today", "2026-13-01", "20261118", "0001-01-01", "9999-12-31", "2026-W01-1"):
        answer = await web.ask("GET", f"/stats?day={day}")
        assert answer.status_code == 422, day
        assert answer.json()["errors"][0]["field"] == "day"


async def test_quarantined_messages_are_listed_replayed_and_dropped(web: Site) -> None:
    now = web.backends.clock.now()
    items = [
        Quarantined(id=new_id(), at=now, reason="not_json", detail="x", body=b"\xff\x00{" + bytes([n])) for n in range(3)
    ]
    await web.backends.store.quarantine(items)
    page = (await web.ask("GET", "/quarantine?limit=2")).json()
    assert [item["id"] for item in page["items"]] == [items[2].id, items[1].id]
    rest = (await web.ask("GET", f"/quarantine?limit=2&cursor={page['next_cursor']}")).json()
    assert ([item["id"] for item in rest["items"]], rest["next_cursor"]) == ([items[0].id], None)
    assert (await web.ask("GET", f"/quarantine/{items[0].id}")).json()["body"] == "\\xff\x00{\x00"
    assert (await web.ask("POST", f"/quarantine/{items[0].id}/replay")).status_code == 200
    [delivery] = await web.backends.stream.receive(10, 1)
    assert delivery.body == items[0].body
    assert (await web.ask("DELETE", f"/quarantine/{items[1].id}")).status_code == 204
    assert [item.id for item in await web.backends.store.quarantined(10)] == [items[2].id]
    for method, path in (("DELETE", ""), ("POST", "/replay"), ("GET", "")):
        assert (await web.ask(method, f"/quarantine/{items[0].id}{path}")).status_code == 404


async def test_execution_logs_go_into_the_stream_and_bad_ones_are_named(web: Site) -> None:
    good = {"execution_id": "e", "task_id": "t", "type": "LOG", "device_id": "dev-1", "content": "hi", "extra": 1}
    bad: list[Any] = [7, {}, {**good, "type": "NOISE"}, {**good, "task_id": 1}, {**good, "device_id": {"$ne": 1}},
                      {**good, "content": "x" * 1_100_000}]  # fmt: skip
    answer = await web.ask("POST", "/execution-logs", json={"messages": [good, *bad, good]})
    assert answer.status_code == 202
    assert (answer.json()["accepted"], [row["index"] for row in answer.json()["rejected"]]) == (2, [1, 2, 3, 4, 5, 6])
    assert len(await web.backends.stream.receive(10, 1)) == 2
    for body in ({"messages": [good] * 1001}, {"messages": {}}, {}, {"messages": [], "more": 1}):
        assert (await web.ask("POST", "/execution-logs", json=body)).status_code == 422


@pytest.mark.parametrize(
    "wrong",
    [{"seq": "x"}, {"progress": "half"}, {"time": "soon"}, {"content": 7}, {"exit_code": 1.5}, {"retryable": "no"},
     {"error": "it broke"}, {"stream": 1}],
)  # fmt: skip
async def test_a_message_of_a_wrong_shape_is_rejected_at_once_with_its_field(web: Site, wrong: dict[str, Any]) -> None:
    good = {"execution_id": "e", "task_id": "t", "type": "LOG", "content": "hi"}
    answer = await web.ask("POST", "/execution-logs", json={"messages": [{**good, **wrong}, good]})
    body = answer.json()
    assert (answer.status_code, body["accepted"]) == (202, 1)
    [rejected] = body["rejected"]
    assert rejected["index"] == 0
    assert next(iter(wrong)) in rejected["reason"]
    [delivery] = await web.backends.stream.receive(10, 1)
    assert b'"hi"' in delivery.body


async def test_docs_work_offline_and_know_the_bodies(web: Site) -> None:
    root = await web.client.get("/")
    assert (root.status_code, root.headers["Location"]) == (307, "/docs")
    page = (await web.client.get("/docs")).text
    assert "https://" not in page
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert f"/docs/{name}" in page
        assert len((await web.client.get(f"/docs/{name}")).content) > 10_000
    schema = (await web.client.get("/openapi.json")).json()
    assert "retry" in schema["components"]["schemas"]["TaskBody"]["properties"]
    assert schema["paths"]["/api/v1/tasks"]["post"]["requestBody"]
    assert "whole log" in schema["paths"]["/api/v1/tasks/{task_id}/logs"]["get"]["description"]
