"""Creating tasks: what is asked, in which order, and what is left when a part is away."""

import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from scriptdispatch.domain.model import Priority
from scriptdispatch.errors import QueueUnavailable, Refused, SettingsError, StoreUnavailable
from scriptdispatch.services import syntax
from scriptdispatch.services.create import key_maker
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.syntax import SyntaxChecker
from tests.unit.web_helpers import SHELL, Site, site

SECRET = "hunter2-correct-horse"


@pytest.fixture(params=["memory", "sqlite"])
async def web(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with site(request.param, tmp_path) as found:
        yield found


async def test_a_created_task_is_stored_queued_and_has_a_history(web: Site) -> None:
    task = await web.create(name="one", device_id="dev-1", labels={"a": "b"})
    assert (task["status"], task["queued"], task["attempt"], task["round"]) == ("waiting", True, 0, 1)
    assert task["timeout_seconds"] == 1800
    assert task["retry"]["max_retries"] == 3
    assert task["script"]["sha256"] == hashlib.sha256(b"echo hello").hexdigest()
    assert task["script_id"] == hashlib.sha256(b"shell\0echo hello").hexdigest()
    assert await web.backends.queue.known([task["id"]]) == {task["id"]}
    [row] = (await web.ask("GET", f"/tasks/{task['id']}/history")).json()["items"]
    assert (row["kind"], row["to"], row["actor"], row["reason"]) == ("STATE_CHANGE", "waiting", "anonymous", "created")


async def test_a_stored_script_can_be_used_again_by_its_id(web: Site) -> None:
    first = await web.create()
    second = await web.create(script=None, script_id=first["script_id"])
    assert second["script"] == first["script"]


async def test_a_task_of_next_week_is_left_to_the_loader_and_a_past_time_is_now(web: Site) -> None:
    now = web.backends.clock.now()
    later = await web.create(run_at=format_time(now + timedelta(days=7)))
    assert (later["queued"], await web.backends.queue.known([later["id"]])) == (False, set())
    past = await web.create(run_at="2020-01-01T00:00:00+08:00")
    assert past["run_at"] == "2019-12-31T16:00:00.000Z"
    assert past["next_run_at"] == past["created_at"]
    assert past["queued"] is True


async def test_with_the_queue_down_a_task_is_accepted_and_says_that_it_is_not_queued(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise QueueUnavailable("gone")

    monkeypatch.setattr(web.backends.queue, "push", away)
    monkeypatch.setattr(web.backends.events, "publish", away)
    monkeypatch.setattr(web.backends.queue, "places", away)
    task = await web.create(device_id="dev-1")
    assert task["queued"] is False
    [stored] = await web.backends.store.tasks([task["id"]])
    assert stored is not None
    assert stored.queued is False
    assert task["waiting_for"]["reason"] == "lock_service"


async def test_with_the_store_down_the_answer_is_503_and_says_that_nothing_was_stored(
    web: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("disk full")

    monkeypatch.setattr(web.backends.store, "commit", away)
    answer = await web.ask("POST", "/tasks", json={"script": SHELL})
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["outcome"]) == (503, "store_unavailable", "nothing_stored")
    assert "Traceback" not in capsys.readouterr().out


async def test_each_distinct_device_of_a_batch_is_asked_for_once(web: Site) -> None:
    tasks = [{"script": SHELL, "device_id": f"dev-{n % 3}"} for n in range(30)] + [
        {"script": SHELL, "device_id": "ghost"}
    ] * 2
    body = (await web.ask("POST", "/tasks/batch", json={"tasks": tasks})).json()
    assert (body["created"], body["failed"]) == (30, 2)
    assert sorted(web.central.asked) == ["dev-0", "dev-1", "dev-2", "ghost"]


async def test_items_of_a_batch_keep_their_order_in_the_lane(web: Site) -> None:
    tasks = [{"script": SHELL, "device_id": "dev-1", "name": f"t{n}"} for n in range(20)]
    body = (await web.ask("POST", "/tasks/batch", json={"tasks": tasks})).json()
    assert await web.backends.queue.lane("dev-1", 100) == [item["task"]["id"] for item in body["items"]]


async def test_a_task_without_a_device_asks_nobody(web: Site) -> None:
    web.central.away = True
    await web.create()
    assert web.central.asked == []


async def test_a_dedupe_key_is_taken_once_also_within_a_batch(web: Site) -> None:
    first = await web.create(dedupe_key="k")
    answer = await web.ask("POST", "/tasks", json={"script": SHELL, "dedupe_key": "k"})
    assert (answer.status_code, answer.json()["code"]) == (409, "duplicate_task")
    assert answer.json()["existing_id"] == first["id"]
    batch = {"tasks": [{"script": SHELL, "dedupe_key": "b"}] * 2}
    items = (await web.ask("POST", "/tasks/batch", json=batch)).json()["items"]
    assert [item["status"] for item in items] == [201, 409]
    assert items[1]["error"]["existing_id"] == items[0]["task"]["id"]
    assert await web.stored() == 2


async def test_secrets_are_masked_wherever_a_task_is_shown(web: Site, capfd: pytest.CaptureFixture[str]) -> None:
    body = {
        "script": {"language": "shell", "content": "login {{ pw }} # {{ user }}"},
        "params": {"pw": SECRET, "user": "root"},
        "secret_params": ["pw"],
    }
    task = await web.create(**body)
    assert task["params"] == {"pw": "***", "user": "root"}
    for path in ("/tasks", f"/tasks/{task['id']}", f"/tasks/{task['id']}/history", f"/tasks/{task['id']}/script"):
        assert SECRET not in (await web.ask("GET", path)).text
    checked = (await web.ask("POST", "/tasks/check", json=body)).json()
    assert checked["rendered"] == "login *** # root"
    # A checker's complaint quotes the line: with a secret in the text only its number is told.
    broken = {**body, "script": {"language": "shell", "content": "echo {{ pw }})"}}
    for path in ("/tasks", "/tasks/check"):
        answer = await web.ask("POST", path, json=broken)
        assert SECRET not in answer.text
        assert "line 1" in answer.text
    assert SECRET not in "".join(capfd.readouterr())


async def test_output_that_repeats_a_secret_is_masked(web: Site) -> None:
    from scriptdispatch.domain.model import LogLine

    task = await web.create(params={"pw": SECRET}, secret_params=["pw"])
    line = LogLine(
        task_id=task["id"], execution_id="e", seq=1, time=web.backends.clock.now(), stream="stdout", content=f"pw={SECRET}!"
    )
    await web.backends.store.append_logs([line], max_per_execution=10)
    [shown] = (await web.ask("GET", f"/tasks/{task['id']}/logs")).json()["items"]
    assert shown["content"] == "pw=***!"
    assert SECRET not in (await web.ask("GET", f"/tasks/{task['id']}/logs/download")).text


async def test_a_dry_run_tells_everything_and_stores_nothing(web: Site) -> None:
    retry = {"strategy": "exponential", "max_retries": 12, "delay_seconds": 10}
    body = {"script": SHELL, "device_id": "dev-1", "retry": retry, "run_at": "2027-01-01T00:00:00Z"}
    answer = (await web.ask("POST", "/tasks/check", json=body)).json()
    assert (answer["valid"], answer["rendered"], answer["syntax"]["ok"]) == (True, "echo hello", True)
    assert answer["device"]["central"]["online"] is True
    assert answer["lane"] == {"waiting": 0, "busy": False, "task_id": None}
    assert len(answer["retries"]) == 10
    assert answer["retries"][:2] == ["2027-01-01T00:00:10.000Z", "2027-01-01T00:00:30.000Z"]
    ghost = (await web.ask("POST", "/tasks/check", json={"script": SHELL, "device_id": "ghost"})).json()
    assert (ghost["valid"], ghost["device"]["central"]) == (False, None)
    assert await web.stored() == 0


@pytest.mark.parametrize(
    ("language", "text", "ok"),
    [
        ("shell", "echo $(date)\n", True), ("shell", "for i in 1 2; do", False), ("shell", "echo 'a", False),
        ("python", "print(1)", True), ("python", "return 1", False), ("python", "x = (", False),
        ("python", "x = 1\n" * 20_000, True), ("python", "x = 1\n" * 20_000 + "(", False),
        ("python", "(" * 3000, False), ("python", "-" * 30_000 + "1", False), ("shell", "a\0", False),
    ],
)  # fmt: skip
async def test_the_syntax_of_both_languages_is_judged(language: str, text: str, ok: bool) -> None:
    assert (await SyntaxChecker().verdict(language, text)).ok is ok


async def test_a_syntax_check_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for language, text in (("shell", f"touch {mark}"), ("python", f"open({str(mark)!r}, 'w')\n" * 2000)):
        assert (await SyntaxChecker().verdict(language, text)).ok is True
    assert not mark.exists()


async def test_verdicts_are_kept_and_no_checker_means_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = SyntaxChecker()
    assert (await checker.verdict("shell", "fi")).ok is False
    monkeypatch.setattr(syntax.shutil, "which", lambda _: None)
    assert (await checker.verdict("shell", "fi")).ok is False  # remembered
    assert (await checker.verdict("shell", "fi ")).ok is None


def fifth(task_id: str, priority: Priority, due_at: object) -> str:
    return f"2-{priority}-{task_id}"


async def test_the_lane_key_may_come_from_a_function_of_the_site(tmp_path: Path) -> None:
    assert key_maker("tests.unit.test_create:fifth")("id", "high", web.__doc__) == "2-high-id"  # type: ignore[arg-type]
    for wrong in ("no.such.module:f", "tests.unit.test_create:missing"):
        with pytest.raises(SettingsError, match="queue_strategy"):
            key_maker(wrong)


async def test_a_refusal_in_the_service_is_the_same_for_every_caller(web: Site) -> None:
    creator = web.app.state.parts.creator
    with pytest.raises(Refused) as refused:
        await creator.create({"script": SHELL, "device_id": "ghost"}, "me")
    assert (refused.value.status, refused.value.code) == (422, "device_not_found")
