"""Deny by default: every route asks for a token with its scope, whatever is tried (S01, S02)."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from scriptdispatch.services import tokens
from scriptdispatch.services.tokens import SCOPES
from scriptdispatch.web import app as web_app
from scriptdispatch.web.routes import OPEN, guards
from tests.unit.web_helpers import API, SHELL, TOKEN, Site, served, site, until

OPEN_PATHS = {"/healthz", "/readyz"}


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Site]:
    async with site("memory", tmp_path, api_tokens=(TOKEN,)) as found:
        yield found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def make(web: Site, *scopes: str) -> tuple[str, str]:
    body = {"name": "made", "scopes": list(scopes)}
    answer = await web.ask("POST", "/tokens", json=body, headers=bearer(TOKEN))
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], answer.json()["token"]


def walk(app: FastAPI) -> list[tuple[str, str, str]]:
    """(method, path, scope) of every route."""
    found = []
    for route, guard in guards(app):
        assert guard is not None, f"{route} has no guard"
        path = route.path.replace("{device_id:path}", "dev-1").replace("{task_id}", "0" * 36).replace("{id}", "x")
        found += [(method, path, guard.route.scope) for method in route.methods]
    return found


async def test_every_route_but_health_refuses_a_caller_without_a_valid_token(web: Site) -> None:
    _, revoked = await make(web, "admin")
    revoked_id = revoked.split("_")[1]
    await web.ask("DELETE", f"/tokens/{revoked_id}", headers=bearer(TOKEN))
    _, expired = await make(web, "admin")
    await expire(web, expired)
    wrong = TOKEN[:-1] + "x"
    attempts: list[dict[str, str]] = [
        {}, {"Authorization": ""}, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"},
        bearer(""), bearer("sd__"), bearer(wrong), bearer("sd_nobody_" + "0" * 32), bearer(revoked), bearer(expired),
        {"X-Forwarded-For": "127.0.0.1"}, {"Cookie": f"token={TOKEN}"},
    ]  # fmt: skip
    routes = walk(web.app)
    assert len(routes) > 30
    for method, path, scope in routes:
        for headers in attempts:
            answer = await web.client.request(method, path, headers=headers)
            if scope == OPEN:
                assert path in OPEN_PATHS
                assert answer.status_code in (200, 503)
            else:
                assert answer.status_code == 401, (method, path, headers)
                assert answer.json()["code"] == "unauthorized"
                assert "WWW-Authenticate" in answer.headers


async def expire(web: Site, token: str) -> None:
    """Moves its expiry into the past, in the store."""
    [stored] = [one for one in await web.backends.store.tokens() if one.id == token.split("_")[1]]
    await web.backends.store.save_token(msgspec.structs.replace(stored, expires_at=stored.created_at - timedelta(days=1)))
    web.app.state.parts.tokens._read_at = None


async def test_every_route_refuses_a_token_with_all_scopes_but_its_own(web: Site) -> None:
    for scope in SCOPES:
        if scope == "admin":
            others = [other for other in SCOPES if other != "admin"]
        else:
            others = [other for other in SCOPES if other not in (scope, "admin")]
        _, token = await make(web, *others)
        for method, path, asked in walk(web.app):
            if asked == scope:
                answer = await web.client.request(method, path, headers=bearer(token))
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path)
    assert await web.stored() == 0


async def test_a_token_with_the_scope_may(web: Site) -> None:
    _, writer = await make(web, "task:write")
    _, reader = await make(web, "task:read")
    created = await web.ask("POST", "/tasks", json={"script": SHELL}, headers=bearer(writer))
    assert created.status_code == 201
    assert created.json()["created_by"] == "made"
    path = f"/tasks/{created.json()['id']}"
    assert (await web.ask("GET", path, headers=bearer(reader))).status_code == 200
    assert (await web.ask("DELETE", path, headers=bearer(reader))).status_code == 403
    assert (await web.ask("GET", path, headers=bearer(reader))).json()["status"] == "waiting"


@pytest.mark.parametrize(
    "path",
    [
        "//api/v1/tasks", "/api//v1/tasks", "/api/v1//tasks", "/api/v1/tasks/", "/API/v1/tasks", "/api/v1/Tasks",
        "/healthz/../api/v1/tasks", "/healthz/..;/api/v1/tasks", "/api/v1/tasks;.css", "/api/v1/tasks.json", "/healthz/",
        "/api/v1/tasks%2f", "/%61pi/v1/tasks", "/healthz%2f..%2fapi%2fv1%2ftasks", "/api/v1/./tasks",
    ],
)  # fmt: skip
async def test_tricks_with_the_path_or_method_open_nothing(web: Site, path: str) -> None:
    url = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
    for method in ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "PROPFIND"):
        answer = await web.client.send(httpx.Request(method, url))
        assert answer.status_code in (401, 403, 404, 405), (method, path, answer.text)


async def test_a_route_without_a_scope_fails_the_start(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(app: FastAPI, routes: Any, prefix: str = "") -> None:
        async def endpoint() -> None:
            return None

        app.add_api_route("/forgotten", endpoint)

    monkeypatch.setattr(web_app, "register", forgetful)
    parts = web.app.state.parts
    with pytest.raises(RuntimeError, match="/forgotten"):
        web_app.create_app(parts.settings, web.backends, parts.central)


async def test_revoking_a_token_ends_its_use_at_once_and_its_open_stream(tmp_path: Path) -> None:
    async with served("memory", tmp_path, api_tokens=(TOKEN,)) as web:
        id, token = await make(web, "task:read")
        async with web.client.stream("GET", f"{API}/events", headers=bearer(token)) as stream:
            chunks = stream.aiter_raw()
            assert await anext(chunks)
            assert (await web.ask("DELETE", f"/tokens/{id}", headers=bearer(TOKEN))).status_code == 200
            assert (await web.ask("GET", "/tasks", headers=bearer(token))).status_code == 401
            assert [chunk async for chunk in chunks] == []  # it ends


async def test_a_secret_is_shown_once_and_stored_hashed(web: Site) -> None:
    id, token = await make(web, "task:read")
    listed = await web.ask("GET", "/tokens", headers=bearer(TOKEN))
    secret = token.split("_", 2)[2]
    assert id in listed.text
    assert secret not in listed.text
    assert "hash" not in listed.text
    assert all(secret not in stored.hash for stored in await web.backends.store.tokens())


async def test_a_revoked_last_token_does_not_open_the_api(tmp_path: Path) -> None:
    async with site("memory", tmp_path) as web:
        created = await web.ask("POST", "/tokens", json={"name": "only", "scopes": ["admin"]})
        assert (await web.ask("GET", "/tasks")).status_code == 401
        token = created.json()["token"]
        assert (await web.ask("DELETE", f"/tokens/{created.json()['id']}", headers=bearer(token))).status_code == 200
        assert (await web.ask("GET", "/tasks")).status_code == 401


@pytest.mark.parametrize(
    "body",
    [{}, {"name": "x"}, {"name": "x", "scopes": []}, {"name": "x", "scopes": ["root"]}, {"name": "", "scopes": ["admin"]},
     {"name": "x", "scopes": ["admin"], "expires_at": "2020-01-01T00:00:00Z"},
     {"name": "x", "scopes": ["admin"], "expires_at": "soon"}, {"name": "x", "scopes": ["admin"], "hash": "1"}],
)  # fmt: skip
async def test_a_token_of_nonsense_is_refused(web: Site, body: dict[str, Any]) -> None:
    answer = await web.ask("POST", "/tokens", json=body, headers=bearer(TOKEN))
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert await web.backends.store.tokens() == []


async def test_an_open_api_answers_only_to_this_machine_and_to_no_other_site(tmp_path: Path) -> None:
    async with site("memory", tmp_path) as web:
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1", ""):
            assert (await web.ask("GET", "/tasks", headers={"Host": host})).status_code == 403, host
        for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080"):
            assert (await web.ask("GET", "/tasks", headers={"Host": host})).status_code == 200, host
        answer = await web.ask("POST", "/reconcile", headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 403


async def test_a_caller_beyond_the_rate_is_told_when_to_come_again(tmp_path: Path) -> None:
    tokens = (TOKEN, "sd_other_0123456789abcdef0123")
    async with site("memory", tmp_path, api_tokens=tokens, rate_limit_per_second=5) as web:
        answers = [await web.ask("GET", "/version", headers=bearer(TOKEN)) for _ in range(20)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert [answer.status_code for answer in answers[:5]] == [200] * 5
        assert refused
        assert int(refused[0].headers["Retry-After"]) >= 1
        assert refused[0].json()["code"] == "too_many_requests"
        assert (await web.ask("GET", "/version", headers=bearer(tokens[1]))).status_code == 200
        assert (await web.client.get("/healthz")).status_code == 200
        logs = [await web.ask("POST", "/execution-logs", json={"messages": []}, headers=bearer(TOKEN)) for _ in range(10)]
        assert {answer.status_code for answer in logs} == {202}

        async def again() -> bool:
            return (await web.ask("GET", "/version", headers=bearer(TOKEN))).status_code == 200

        await until(again)


async def test_revoking_cancels_what_waits_of_that_token_only_if_asked_and_page_by_page(
    web: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PAGE", 2)
    id, text = await make(web, "task:write", "task:read")
    body = {"name": "x", "script": SHELL}
    own = [(await web.ask("POST", "/tasks", json=body, headers=bearer(text))).json()["id"] for _ in range(5)]
    other = (await web.ask("POST", "/tasks", json=body, headers=bearer(TOKEN))).json()["id"]
    admin = bearer(TOKEN)
    plain = await web.ask("DELETE", f"/tokens/{id}", headers=admin)
    assert "tasks_canceled" not in plain.json()
    for count in (5, 0):  # it may be repeated
        answer = await web.ask("DELETE", f"/tokens/{id}", params={"cancel_tasks": "true"}, headers=admin)
        assert answer.json()["tasks_canceled"] == count
    found = [(await web.ask("GET", f"/tasks/{one}", headers=admin)).json() for one in (*own, other)]
    assert [task["status"] for task in found] == ["canceled"] * 5 + ["waiting"]
    assert found[0]["error"]["message"] == f"token {id} (made) was revoked"


async def test_tasks_of_a_name_that_two_tokens_share_are_not_canceled_with_one_of_them(web: Site) -> None:
    id, text = await make(web, "task:read")
    await make(web, "task:write")
    answer = await web.ask("DELETE", f"/tokens/{id}", params={"cancel_tasks": "true"}, headers=bearer(TOKEN))
    assert (answer.status_code, answer.json()["code"]) == (409, "name_shared")
    assert (await web.ask("GET", "/tasks", headers=bearer(text))).status_code == 200, "nothing was done"
