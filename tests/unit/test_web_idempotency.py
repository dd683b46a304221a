"""`Idempotency-Key`: the first answer again, nothing twice, also in parallel and after a death (F04)."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.ids import new_id
from scriptdispatch.services.idempotency import request_hash
from scriptdispatch.store.port import Remembered
from scriptdispatch.web.api.tasks import single_id
from tests.unit.web_helpers import API, SHELL, Site, site

BODY = {"script": SHELL, "name": "once"}


@pytest.fixture(params=["memory", "sqlite"])
async def web(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with site(request.param, tmp_path) as found:
        yield found


async def post(web: Site, key: str, body: Any = BODY, path: str = "/tasks") -> httpx.Response:
    return await web.ask("POST", path, json=body, headers={"Idempotency-Key": key})


async def test_a_repeat_gets_the_first_answer_again_and_creates_nothing(web: Site) -> None:
    first, second = await post(web, "k1"), await post(web, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert await web.stored() == 1


async def test_the_order_of_fields_does_not_count_and_another_key_is_another_task(web: Site) -> None:
    await post(web, "k1")
    turned = await post(web, "k1", dict(reversed(BODY.items())))
    assert turned.headers["Idempotent-Replayed"] == "true"
    await post(web, "k2")
    assert await web.stored() == 2


async def test_another_body_or_path_under_the_same_key_is_refused(web: Site) -> None:
    await post(web, "k1")
    for answer in (await post(web, "k1", {**BODY, "name": "two"}), await post(web, "k1", {"tasks": [BODY]}, "/tasks/batch")):
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_mismatch")
    assert await web.stored() == 1


async def test_twenty_in_parallel_make_one_task_and_get_one_answer(web: Site) -> None:
    answers = await asyncio.gather(*(post(web, "k1") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert await web.stored() == 1


def test_ids_of_quick_requests_keep_their_order() -> None:
    made = [single_id(new_id()) for _ in range(1000)]
    assert made == sorted(made)
    assert len(set(made)) == 1000


async def test_a_batch_is_repeated_as_a_whole(web: Site) -> None:
    body = {"tasks": [BODY, {"script": SHELL, "colour": 1}, BODY]}
    first, second = await post(web, "b", body, "/tasks/batch"), await post(web, "b", body, "/tasks/batch")
    assert first.content == second.content
    assert first.json()["created"] == 2
    assert await web.stored() == 2


async def test_an_error_that_stored_nothing_is_not_remembered(web: Site) -> None:
    web.central.away = True
    refused = await post(web, "k1", {**BODY, "device_id": "dev-1"})
    assert (refused.status_code, refused.json()["code"]) == (503, "central_unavailable")
    web.central.away = False
    again = await post(web, "k1", {**BODY, "device_id": "dev-1"})
    assert again.status_code == 201
    assert "Idempotent-Replayed" not in again.headers


async def test_a_first_one_that_died_is_taken_over_with_the_same_ids(web: Site) -> None:
    died = Remembered(
        seed=new_id(),
        request_hash=request_hash(f"{API}/tasks", BODY),
        begun_at=web.backends.clock.now() - timedelta(seconds=31),
    )
    assert await web.backends.store.remember("anonymous", "k1", died) is None
    # It had stored the task, and died before it could answer.
    task = await web.app.state.parts.creator.create(BODY, "anonymous", id=single_id(died.seed))
    web.central.away = True  # what is stored needs no second check
    answer = await post(web, "k1")
    assert (answer.status_code, answer.json()["id"]) == (201, task.id)
    assert await web.stored() == 1
    assert (await post(web, "k1")).headers["Idempotent-Replayed"] == "true"


async def test_an_unknown_outcome_is_said_and_the_repeat_makes_one_task(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = web.backends.store.commit

    async def lost_reply(changes: Any, **rest: Any) -> Any:
        await commit(changes, **rest)
        raise StoreUnavailable("the reply was lost", outcome_unknown=True)

    monkeypatch.setattr(web.backends.store, "commit", lost_reply)
    answer = await post(web, "k1")
    assert (answer.status_code, answer.json()["code"], answer.json()["outcome"]) == (503, "store_unavailable", "unknown")
    monkeypatch.setattr(web.backends.store, "commit", commit)
    again = await post(web, "k1")  # at once: it need not wait until the first counts as dead
    assert again.status_code == 201
    assert await web.stored() == 1
    assert await web.backends.queue.known([again.json()["id"]]) == {again.json()["id"]}


async def test_a_bug_after_the_task_was_stored_does_not_let_a_repeat_store_it_again(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = web.backends.queue.places

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(web.backends.queue, "places", broken)
    assert (await post(web, "k1")).status_code == 500
    monkeypatch.setattr(web.backends.queue, "places", places)
    assert (await post(web, "k1")).status_code == 201
    assert await web.stored() == 1


async def test_a_store_that_goes_away_after_the_insert_does_not_take_the_201_back(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(web.backends.store, "scripts", away)
    assert (await post(web, "k1")).status_code == 201


async def test_who_waits_too_long_for_a_first_one_is_told_what_to_do(web: Site) -> None:
    web.app.state.parts.idempotency._wait_s = 0.05
    busy = Remembered(seed=new_id(), request_hash=request_hash(f"{API}/tasks", BODY), begun_at=web.backends.clock.now())
    await web.backends.store.remember("anonymous", "k1", busy)
    answer = await post(web, "k1")
    assert (answer.status_code, answer.json()["code"]) == (409, "illegal_state")
    assert "same key" in answer.json()["detail"]
    assert await web.stored() == 0


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
async def test_a_key_of_a_wrong_shape_is_refused(web: Site, key: str) -> None:
    answer = await post(web, key)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"
