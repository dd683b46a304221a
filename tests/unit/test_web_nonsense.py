"""What is not a task is refused, with the right code and the field's name, and nothing is stored (F06, S04)."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.web_helpers import API, SHELL, Site, site


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Site]:
    async with site("memory", tmp_path) as found:
        yield found


NONSENSE: dict[str, tuple[dict[str, Any], str, str]] = {
    "no script": ({"script": None}, "validation_error", "script"),
    "script and script_id": ({"script_id": "0" * 64}, "validation_error", "script"),
    "unknown script_id": ({"script": None, "script_id": "0" * 64}, "validation_error", "script_id"),
    "script_id of a wrong shape": ({"script": None, "script_id": "nope"}, "validation_error", "script_id"),
    "script is a text": ({"script": "echo"}, "validation_error", "script"),
    "empty script": ({"script": {"language": "shell", "content": ""}}, "invalid_script", "script.content"),
    "blank script": ({"script": {"language": "shell", "content": " \n\t"}}, "invalid_script", "script.content"),
    "no language": ({"script": {"content": "x"}}, "validation_error", "script.language"),
    "unknown language": ({"script": {"language": "cobol", "content": "x"}}, "validation_error", "script.language"),
    "field in script": ({"script": {**SHELL, "sha256": "x"}}, "validation_error", "script.sha256"),
    "bad shell": ({"script": {"language": "shell", "content": "if true"}}, "invalid_script", "script.content"),
    "bad python": ({"script": {"language": "python", "content": "def"}}, "invalid_script", "script.content"),
    "NUL in script": ({"script": {"language": "shell", "content": "a\0b"}}, "invalid_script", "script.content"),
    "script too long": ({"script": {"language": "shell", "content": "#" * 1_048_577}}, "validation_error", "script.content"),
    "unknown device": ({"device_id": "ghost"}, "device_not_found", "device_id"),
    "empty device": ({"device_id": ""}, "validation_error", "device_id"),
    "device with ~": ({"device_id": "~dev"}, "validation_error", "device_id"),
    "device with control character": ({"device_id": "dev\n1"}, "validation_error", "device_id"),
    "long device": ({"device_id": "dev" + "x" * 200}, "validation_error", "device_id"),
    "device is a number": ({"device_id": 7}, "validation_error", "device_id"),
    "empty name": ({"name": ""}, "validation_error", "name"),
    "long name": ({"name": "n" * 201}, "validation_error", "name"),
    "name with NUL": ({"name": "a\0"}, "validation_error", "name"),
    "name is a list": ({"name": ["a"]}, "validation_error", "name"),
    "unknown type": ({"type": "http"}, "type_not_found", "type"),
    "type is null": ({"type": None}, "validation_error", "type"),
    "unknown priority": ({"priority": "urgent"}, "validation_error", "priority"),
    "priority is a number": ({"priority": 1}, "validation_error", "priority"),
    "time without offset": ({"run_at": "2030-01-01T00:00:00"}, "validation_error", "run_at"),
    "time is a number": ({"run_at": 1900000000}, "validation_error", "run_at"),
    "time that is none": ({"run_at": "tomorrow"}, "validation_error", "run_at"),
    "30 February": ({"run_at": "2027-02-30T00:00:00Z"}, "validation_error", "run_at"),
    "time before all times": ({"run_at": "0001-01-01T00:00:00+23:59"}, "validation_error", "run_at"),
    "in 70 years": ({"run_at": "2096-01-01T00:00:00Z"}, "validation_error", "run_at"),
    "timeout 0": ({"timeout_seconds": 0}, "validation_error", "timeout_seconds"),
    "timeout too long": ({"timeout_seconds": 604_801}, "validation_error", "timeout_seconds"),
    "timeout is a text": ({"timeout_seconds": "60"}, "validation_error", "timeout_seconds"),
    "timeout is true": ({"timeout_seconds": True}, "validation_error", "timeout_seconds"),
    "timeout is a fraction": ({"timeout_seconds": 1.5}, "validation_error", "timeout_seconds"),
    "timeout beyond 64 bits": ({"timeout_seconds": 10**30}, "validation_error", "timeout_seconds"),
    "negative retries": ({"retry": {"max_retries": -1}}, "validation_error", "retry.max_retries"),
    "unknown strategy": ({"retry": {"strategy": "hope"}}, "validation_error", "retry.strategy"),
    "negative delay": ({"retry": {"delay_seconds": -1}}, "validation_error", "retry.delay_seconds"),
    "back-off below 1": ({"retry": {"backoff_rate": 0.5}}, "validation_error", "retry.backoff_rate"),
    "per_day 0": ({"retry": {"per_day": 0}}, "validation_error", "retry.per_day"),
    "field in retry": ({"retry": {"tries": 3}}, "validation_error", "retry.tries"),
    "retry is a number": ({"retry": 3}, "validation_error", "retry"),
    "jitter is a text": ({"retry": {"jitter": "yes"}}, "validation_error", "retry.jitter"),
    "params is a list": ({"params": [1]}, "validation_error", "params"),
    "params too large": ({"params": {"a": "x" * 65_536}}, "validation_error", "params"),
    "missing param": ({"script": {**SHELL, "content": "{{ who }}"}, "params": {}}, "validation_error", "params.who"),
    "secret without param": ({"secret_params": ["pw"]}, "validation_error", "secret_params"),
    "secret is a number": ({"secret_params": [1]}, "validation_error", "secret_params[0]"),
    "33 labels": ({"labels": {f"k{n}": "v" for n in range(33)}}, "validation_error", "labels"),
    "label is a number": ({"labels": {"site": 1}}, "validation_error", "labels.site"),
    "label with control character": ({"labels": {"site": "a\x1b[31m"}}, "validation_error", "labels.site"),
    "label key with colon": ({"labels": {"a:b": "c"}}, "validation_error", "labels.a:b"),
    "empty dedupe_key": ({"dedupe_key": ""}, "validation_error", "dedupe_key"),
    "unknown field": ({"colour": "red"}, "validation_error", "colour"),
    "depends_on": ({"depends_on": []}, "validation_error", "depends_on"),
    "children": ({"children": []}, "validation_error", "children"),
    "callback_url": ({"callback_url": "https://x"}, "validation_error", "callback_url"),
    "status": ({"status": "success"}, "validation_error", "status"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_is_refused_by_name_and_nothing_is_stored(web: Site, kind: str) -> None:
    change, code, field = NONSENSE[kind]
    answer = await web.ask("POST", "/tasks", json={"script": SHELL, **change})
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["code"]) == (422, 422, code)
    assert field in [row["field"] for row in problem["errors"]]
    assert await web.stored() == 0


FOREIGN = re.compile(r"\b(Input|String|List|Dictionary|Field|should|valid dictionary|pattern)\b")


async def test_what_is_wrong_with_a_field_is_said_in_our_words(web: Site) -> None:
    asked = [("/tasks", {"script": SHELL, **change}) for change, _, _ in NONSENSE.values()]
    asked += [("/tasks/batch", {"tasks": tasks}) for tasks in ([], "x", [{}] * 1001)] + [("/tasks/batch", {})]
    answers = [await web.ask("POST", path, json=body) for path, body in asked]
    queries = ("limit=0", "limit=501", "limit=x", "limit=" + "9" * 5000, "priority=x", "device_id=" + "x" * 201)
    answers += [await web.ask("GET", f"/tasks?{query}") for query in queries]
    answers.append(await web.ask("DELETE", "/tasks/x?force=perhaps"))
    for answer in answers:
        for row in answer.json()["errors"]:
            assert not FOREIGN.search(row["message"]), row
    labels, script = ({"labels": {f"k{n}": "v" for n in range(33)}}, {"script": None, "script_id": "nope"})
    said = [(await web.ask("POST", "/tasks", json={"script": SHELL, **body})).json()["detail"] for body in (labels, script)]
    assert said == [
        "labels: must have at most 32 items", "script_id: must be 64 hexadecimal digits, as `script_id` of a task",
    ]  # fmt: skip


BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "nothing": (b"", {}),
    "not JSON": (b"{", {}),
    "two documents": (b"{}{}", {}),
    "a list": (b"[]", {}),
    "a number": (b"1", {}),
    "NaN": (b'{"timeout_seconds": NaN}', {}),
    "Infinity": (b'{"timeout_seconds": Infinity}', {}),
    "a number beyond all": (b'{"timeout_seconds": 1e999}', {}),
    "bad UTF-8": (b'{"name": "\xff\xfe"}', {}),
    "half a surrogate": (b'{"name": "\\ud800"}', {}),
    "deep": (b'{"params":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    "deep objects": (b'{"params":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", {}),
    "raw control character": (b'{"name": "a\nb"}', {}),
    "a form": (b"name=x", {"Content-Type": "application/x-www-form-urlencoded"}),
    "plain text": (b'{"name": "x"}', {"Content-Type": "text/plain"}),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_that_is_no_document_is_refused_everywhere(web: Site, kind: str) -> None:
    raw, headers = BODIES[kind]
    for path in ("/tasks", "/tasks/batch", "/tasks/check", "/execution-logs", "/tokens"):
        answer = await web.ask("POST", path, content=raw, headers={"Content-Type": "application/json", **headers})
        assert (answer.status_code, answer.json()["code"]) == (422, "validation_error"), path
        assert answer.json()["errors"]
    assert await web.stored() == 0


HOSTILE: list[Any] = [
    {"$ne": None}, {"$gt": ""}, {"$where": "sleep(1000)"}, {"$regex": "(a+)+$"}, [], [None], {}, -1, 1.5, True,
    "'; DROP TABLE script_task; --", "\u202eabc\u0000", {"a": {"b": [{"$ne": 1}]}},
]  # fmt: skip
FIELDS = ["name", "type", "device_id", "script", "script_id", "params", "secret_params", "priority", "run_at",
          "timeout_seconds", "retry", "dedupe_key", "labels"]  # fmt: skip
# Values that are what the field asks for, however they look: kept as data, never as an operator.
FINE = {
    "params": [{}, {"a": {"b": [{"$ne": 1}]}}],
    "secret_params": [[]],
    "retry": [{}],
    "labels": [{}],
    "name": ["'; DROP TABLE script_task; --"],
    "dedupe_key": ["'; DROP TABLE script_task; --"],
}


@pytest.mark.parametrize("field", FIELDS)
async def test_operators_and_wrong_types_in_any_field_reach_no_store(web: Site, field: str) -> None:
    for value in HOSTILE:
        answer = await web.ask("POST", "/tasks", json={"script": SHELL, field: value})
        expected = 201 if any(value is fine or value == fine for fine in FINE.get(field, [])) else 422
        assert answer.status_code == expected, (field, value, answer.text)
        if expected == 422:
            assert any(row["field"].startswith((field, "script")) for row in answer.json()["errors"]), answer.text


@pytest.mark.parametrize("parameter", ["status", "ids", "priority", "label", "created_after", "limit", "cursor"])
async def test_operators_in_filters_are_refused_or_find_nothing(web: Site, parameter: str) -> None:
    await web.create()
    for value in ("$ne", '{"$ne":null}', "' OR 1=1 --", "\x00", "[$gt]", "-1", "(a+)+$"):
        answer = await web.ask("GET", "/tasks", params={parameter: value})
        assert answer.status_code == 422 or answer.json()["items"] == [], (parameter, value, answer.text)
        bracket = await web.ask("GET", f"/tasks?{parameter}[$ne]=x")
        assert bracket.status_code == 422


@pytest.mark.parametrize(("field", "value"), [("status", "done"), ("priority", "urgent"), ("error_code", "NOPE")])
async def test_a_filter_that_no_task_can_meet_is_refused_by_name(web: Site, field: str, value: str) -> None:
    answer = await web.ask("GET", "/tasks", params={field: value})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tasks/x/pause"), ("POST", "/tasks/x/restart"), ("PUT", "/tasks/x/status"), ("GET", "/tasks/x/children"),
        ("GET", "/schedules"), ("GET", "/task-types"), ("POST", "/session"), ("GET", "/nothing"), ("GET", "//tasks"),
        ("GET", "/tasks/"), ("GET", "/Tasks"),
    ],
)  # fmt: skip
async def test_what_this_version_does_not_have_is_a_404_problem(web: Site, method: str, path: str) -> None:
    answer = await web.ask(method, path)
    assert answer.status_code == 404
    assert answer.json()["code"] in ("not_found", "task_not_found")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
async def test_a_wrong_method_is_a_405_problem(web: Site, method: str) -> None:
    answer = await web.ask(method, "/tasks")
    assert answer.status_code == 405
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["Allow"] == "GET, POST"
    if method != "HEAD":
        assert answer.json()["detail"] == "/api/v1/tasks takes GET, POST"


async def test_an_unknown_parameter_is_named(web: Site) -> None:
    for path in ("/tasks?colour=red", "/stats?colour=red", "/workers?colour=red", "/tasks/x?purge=true"):
        method = "DELETE" if "purge" in path else "GET"
        answer = await web.ask(method, path)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] in ("colour", "purge")


async def test_a_bug_becomes_an_internal_error_whose_id_is_in_the_log(
    web: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret inside")

    monkeypatch.setattr(web.backends.store, "counts", broken)
    answer = await web.ask("GET", "/stats")
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "internal_error")
    assert "secret inside" not in answer.text
    out = capsys.readouterr()
    assert problem["id"] in out.out + out.err


async def test_batch_answers_each_item_and_one_bad_does_not_sink_the_rest(web: Site) -> None:
    tasks: list[Any] = [{"script": SHELL}, {"script": SHELL, "colour": 1}, 7, {"script": SHELL, "device_id": "ghost"}]
    answer = await web.ask("POST", "/tasks/batch", json={"tasks": tasks})
    body = answer.json()
    assert answer.status_code == 200
    assert [item["status"] for item in body["items"]] == [201, 422, 422, 422]
    assert [item["index"] for item in body["items"]] == [0, 1, 2, 3]
    assert (body["created"], body["failed"]) == (1, 3)
    assert body["items"][1]["error"]["errors"][0]["field"] == "colour"
    assert body["items"][3]["error"]["code"] == "device_not_found"
    assert await web.stored() == 1


@pytest.mark.parametrize("tasks", [[], "x", None, {}, [{}] * 1001])
async def test_a_batch_of_a_wrong_shape_or_size_names_tasks(web: Site, tasks: Any) -> None:
    answer = await web.ask("POST", "/tasks/batch", content=json.dumps({"tasks": tasks}))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "tasks"


async def test_a_declared_body_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with site("memory", tmp_path, max_body_bytes=2000) as web:
        answer = await web.client.post(f"{API}/tasks", content=b"x" * 2001, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
