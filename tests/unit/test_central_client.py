"""Central control's client against a small server on a real socket."""

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from scriptdispatch.central import client as module
from scriptdispatch.central.client import CentralControl, PushFailed, PushRequest
from scriptdispatch.central.lab_server import Reply, Request, Session, json_reply
from scriptdispatch.errors import CentralUnavailable
from scriptdispatch.settings import Settings

SCRIPT = "echo hello"
PUSH = PushRequest(
    execution_id="0190a5c0-0000-7000-8000-000000000001",
    task_id="0190a5c0-0000-7000-8000-000000000002",
    device_id="dev-001",
    language="shell",
    script=SCRIPT,
    sha256=hashlib.sha256(SCRIPT.encode()).hexdigest(),
    params={"service": "edge"},
    timeout_seconds=60,
    attempt=2,
    fencing_token=7,
)


class HeldClock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at, UTC)

    def uptime(self) -> float:
        return self.at


class Central:
    """What the test wants answered, and what was asked."""

    def __init__(self, reply: Reply | Callable[[Request], Any]) -> None:
        self.reply = reply
        self.requests: list[Request] = []

    def handle(self, request: Request) -> Any:
        self.requests.append(request)
        return self.reply(request) if callable(self.reply) else self.reply


@contextlib.asynccontextmanager
async def central(
    reply: Reply | Callable[[Request], Any], *, limit: int = 4, **settings: Any
) -> AsyncIterator[tuple[Central, CentralControl, HeldClock]]:
    peer, clock = Central(reply), HeldClock()
    sessions: set[Session] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Session(peer.handle, sessions), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    control = CentralControl(Settings(central_url=url, **settings), clock, limit=limit)
    try:
        yield peer, control, clock
    finally:
        await control.close()
        server.close()
        for session in list(sessions):
            session.abort()


async def push(control: CentralControl, **how: Any) -> Any:
    return await control.push(await control.checkout(), PUSH, **how)


def dead_url() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


# ----------------------------------------------------------------------------------------------------------------- pushing


async def test_a_push_carries_exactly_the_fields_of_the_contract() -> None:
    async with central(Reply(202), central_push_path="/v2/jobs") as (peer, control, _):
        assert (await push(control)).outcome == "taken"
    (request,) = peer.requests
    assert (request.method, request.path) == ("POST", "/v2/jobs")
    assert msgspec.json.decode(request.body) == {
        "execution_id": PUSH.execution_id,
        "task_id": PUSH.task_id,
        "device_id": "dev-001",
        "language": "shell",
        "script": SCRIPT,
        "sha256": PUSH.sha256,
        "params": {"service": "edge"},
        "timeout_seconds": 60,
        "attempt": 2,
        "fencing_token": 7,
    }


async def test_no_connection_is_said_before_anything_is_stamped() -> None:
    control = CentralControl(Settings(central_url=dead_url()), HeldClock(), limit=1)
    with pytest.raises(PushFailed) as caught:
        await control.checkout()
    assert (caught.value.answer.outcome, caught.value.answer.connect_failed) == ("not_sent", True)
    await control.close()


async def test_a_name_that_does_not_resolve_and_a_missing_address_are_misconfigured() -> None:
    for url in ("http://no-such-host.invalid", None):
        control = CentralControl(Settings(central_url=url), HeldClock(), limit=1)
        with pytest.raises(PushFailed) as caught:
            await control.checkout()
        assert caught.value.answer.outcome == "misconfigured"
        await control.close()


async def test_the_last_check_before_the_first_byte_can_stop_the_push() -> None:
    async with central(Reply(202)) as (peer, control, _):
        assert (await push(control, before_first_byte=lambda: False)).outcome == "not_sent"
        assert peer.requests == []
        assert (await push(control, before_first_byte=lambda: True)).outcome == "taken"


@pytest.mark.parametrize("wire", ["close", "reset", "half_header"])
async def test_trouble_after_sending_is_unknown_and_nothing_is_sent_again(wire: Any) -> None:
    async with central(Reply(202, wire=wire)) as (peer, control, _):
        assert (await push(control)).outcome == "unknown"
        assert len(peer.requests) == 1
        peer.reply = Reply(202)
        assert (await push(control)).outcome == "taken"


@pytest.mark.parametrize("wire", ["never", "slow"])
async def test_a_push_ends_within_its_limit(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POST_LIMIT_S", 0.3)
    async with central(Reply(202, b"{}", wire=wire)) as (_, control, _):
        begun = time.monotonic()
        assert (await push(control)).outcome == "unknown"
        assert 0.25 < time.monotonic() - begun < 2


async def test_a_connection_that_was_closed_while_idle_is_replaced_and_the_push_goes_out_once() -> None:
    checks: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        control = CentralControl(Settings(central_url=url), HeldClock(), limit=1)
        connection = await control.checkout()
        listener.accept()[0].close()  # the loop has not noticed yet
        pushing = asyncio.create_task(control.push(connection, PUSH, before_first_byte=lambda: not checks.append(True)))
        accepted, _ = await asyncio.to_thread(listener.accept)
        accepted.settimeout(5)
        received = await asyncio.to_thread(accepted.recv, 65536)
        assert received.startswith(b"POST /scripts HTTP/1.1\r\n")
        accepted.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
        assert (await pushing).outcome == "taken"
        assert checks == [True]  # the dead connection was found out before the last check
        accepted.close()
        await control.close()


async def test_a_cancelled_push_gives_its_place_back() -> None:
    async with central(Reply(202, wire="never"), limit=1) as (peer, control, _):
        for _ in range(5):
            hanging = asyncio.create_task(push(control))
            async with asyncio.timeout(5):
                while not peer.requests:
                    await asyncio.sleep(0.005)
            peer.requests.clear()
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
        peer.reply = Reply(202)
        assert (await push(control)).outcome == "taken"


async def test_hanging_pushes_do_not_hold_up_questions() -> None:
    def reply(request: Request) -> Reply:
        return Reply(202, wire="never") if request.method == "POST" else json_reply(200, {"id": "dev-001"})

    async with central(reply, limit=2) as (_, control, _):
        hanging = [asyncio.create_task(push(control)) for _ in range(2)]
        assert await control.device("dev-001") == {"id": "dev-001"}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_settings_and_doubt_reach_the_verdict() -> None:
    async with central(Reply(500), central_5xx_means_refused=True) as (_, control, _):
        assert (await push(control)).outcome == "not_sent"
        assert (await push(control, in_doubt=True)).outcome == "unknown"


async def test_a_redirect_is_not_followed_and_the_token_goes_nowhere() -> None:
    async with central(Reply(202)) as (elsewhere, other, _):
        assert other._pushes is not None
        target = f"http://127.0.0.1:{other._pushes._port}/scripts"
        async with central(Reply(307, headers=[("Location", target)]), central_token="secret") as (_, control, _):
            assert (await push(control)).outcome == "misconfigured"
            with pytest.raises(CentralUnavailable, match="307"):
                await control.device("dev-001")
        assert elsewhere.requests == []


# --------------------------------------------------------------------------------------------------------------- questions


async def test_a_known_device_counts_for_a_while_an_unknown_one_is_asked_again() -> None:
    async with central(json_reply(200, {"id": "dev-001", "online": False}), device_cache_seconds=60) as (
        peer,
        control,
        clock,
    ):
        assert await control.device("dev-001") == {"id": "dev-001", "online": False}
        assert await control.device("dev-001") == {"id": "dev-001", "online": False}
        assert len(peer.requests) == 1
        clock.at += 61
        await control.device("dev-001")
        assert len(peer.requests) == 2
        peer.reply = Reply(404)
        assert await control.device("dev-002") is None
        assert await control.device("dev-002") is None
        assert len(peer.requests) == 4


async def test_who_asks_for_the_same_device_at_once_shares_one_question_even_if_the_first_leaves() -> None:
    async def later() -> Reply:
        await asyncio.sleep(0.05)
        return json_reply(200, {"id": "dev-001"})

    async with central(lambda request: later()) as (peer, control, _):
        asking = [asyncio.create_task(control.device("dev-001")) for _ in range(20)]
        await asyncio.sleep(0)
        asking[0].cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [{"id": "dev-001"}] * 19
        assert len(peer.requests) == 1


async def test_a_thousand_devices_can_be_asked_at_once() -> None:
    async with central(lambda request: json_reply(200, {"id": request.segments[1]})) as (peer, control, _):
        answers = await asyncio.gather(*(control.device(f"dev-{n}") for n in range(1000)))
        assert [answer and answer["id"] for answer in answers] == [f"dev-{n}" for n in range(1000)]
        assert len(peer.requests) == 1000


@pytest.mark.parametrize("device_id", ["a/b", "..", ".", "a b", "ü?x=1#y", "%2e%2e", "a\r\nX: y"])
async def test_a_device_id_stays_one_segment_of_the_path(device_id: str) -> None:
    async with central(json_reply(200, {})) as (peer, control, _):
        await control.device(device_id)
        assert peer.requests[0].segments == ["devices", device_id]
        assert peer.requests[0].path.count("/") == 2
        assert peer.requests[0].path not in ("/devices/..", "/devices/.")


@pytest.mark.parametrize(
    "reply", [Reply(500), Reply(401), Reply(302), Reply(200, b"[]"), Reply(200, b"no json"), Reply(200, wire="close")]
)
async def test_an_answer_that_is_no_answer_is_unavailable(reply: Reply) -> None:
    async with central(reply) as (_, control, _):
        with pytest.raises(CentralUnavailable):
            await control.device("dev-001")


async def test_without_an_address_it_says_what_to_set() -> None:
    control = CentralControl(Settings(central_url=None), HeldClock(), limit=1)
    with pytest.raises(CentralUnavailable, match=r"central_url is not set: .*SCRIPTDISPATCH_CENTRAL_URL"):
        await control.device("dev-001")
    await control.close()


async def test_an_unreachable_central_control_is_unavailable() -> None:
    control = CentralControl(Settings(central_url=dead_url()), HeldClock(), limit=1)
    for question in (control.device("d"), control.cancel("e"), control.probe()):
        with pytest.raises(CentralUnavailable, match="does not answer"):
            await question
    await control.close()


async def test_cancel_tells_will_try_from_never_had() -> None:
    async with central(Reply(202)) as (peer, control, _):
        assert await control.cancel("e-1") == "will_try"
        assert (peer.requests[0].method, peer.requests[0].path) == ("POST", "/executions/e-1/cancel")
        peer.reply = Reply(404)
        assert await control.cancel("e-1") == "never_had"
        peer.reply = Reply(500)
        with pytest.raises(CentralUnavailable):
            await control.cancel("e-1")


@pytest.mark.parametrize(
    ("status", "well"), [(200, True), (404, True), (429, True), (302, False), (401, False), (403, False), (503, False)]
)
async def test_a_probe_takes_any_answer_for_a_yes_but_those_that_would_open_the_breaker_again(
    status: int, well: bool
) -> None:
    async with central(Reply(status)) as (_, control, _):
        if well:
            await control.probe()
        else:
            with pytest.raises(CentralUnavailable):
                await control.probe()


async def test_questions_and_pushes_carry_the_token() -> None:
    heads: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    control = CentralControl(Settings(central_url=url, central_token="t-1"), HeldClock(), limit=1)
    await control.device("dev-001")
    await push(control)
    assert len(heads) == 2
    assert all(b"\r\nAuthorization: Bearer t-1\r\n" in head for head in heads)
    await control.close()
    server.close()
