"""The lab as a real process that runs real scripts; what it publishes is heard by a small API of the test."""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from scriptdispatch.central.client import CentralControl, PushRequest
from scriptdispatch.central.lab import LabConfig
from scriptdispatch.central.lab_server import Reply, Request, Session, json_reply
from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import SettingsError
from scriptdispatch.ids import new_id
from scriptdispatch.mq.signing import verify
from scriptdispatch.settings import Settings

MAIN = """
import sys, msgspec
from scriptdispatch.central.lab import LabConfig, run_lab
config = msgspec.json.decode(sys.argv[1], type=LabConfig, dec_hook=lambda kind, value: kind(value))
run_lab(config, ready=lambda url: print(url, flush=True))
"""
Message = dict[str, Any]


class Api:
    """Takes execution logs as the web process does, and remembers when each came."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.bodies = 0
        self.down = False
        self.refuse = False

    def handle(self, request: Request) -> Reply:
        if self.down:
            return json_reply(503, {})
        self.bodies += 1
        messages = msgspec.json.decode(request.body)["messages"]
        if self.refuse and any(message.get("content") == "refuse me" for message in messages):
            return json_reply(422, {})
        assert len(messages) <= 1000
        self.messages += messages
        return json_reply(202, {"accepted": len(messages), "rejected": []})

    def of(self, execution_id: str, *types: str) -> list[Message]:
        found = [message for message in self.messages if message.get("execution_id") == execution_id]
        return [message for message in found if not types or message["type"] in types]

    def lines(self, execution_id: str) -> list[str]:
        return [message["content"] for message in self.of(execution_id, "LOG")]

    async def result(self, execution_id: str, within_s: float = 15.0) -> Message:
        await until(lambda: bool(self.of(execution_id, "SUCCESS", "FAILURE", "CANCELED")), within_s)
        return self.of(execution_id, "SUCCESS", "FAILURE", "CANCELED")[0]


class Lab:
    """The process, and central control's client to talk to it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, api: Api, folder: Path) -> None:
        self.process, self.url, self.api, self.folder = process, url, api, folder
        self.central = CentralControl(Settings(central_url=url), SystemClock(), limit=32)
        self.http = httpx.AsyncClient(base_url=url, timeout=10)
        self._fence = 0

    def request(self, script: str, language: str = "shell", device: str | None = "dev-001", **rest: Any) -> PushRequest:
        self._fence += 1
        values: dict[str, Any] = {
            "execution_id": new_id(),
            "task_id": new_id(),
            "device_id": device,
            "language": language,
            "script": script,
            "sha256": hashlib.sha256(script.encode()).hexdigest(),
            "params": None,
            "timeout_seconds": 30,
            "attempt": 1,
            "fencing_token": self._fence,
        }
        return PushRequest(**{**values, **rest})

    async def push(self, request: PushRequest) -> Any:
        return await self.central.push(await self.central.checkout(), request)

    async def run(self, script: str, language: str = "shell", **rest: Any) -> PushRequest:
        request = self.request(script, language, **rest)
        answer = await self.push(request)
        assert answer.outcome == "taken", answer
        return request

    async def ledger(self, **wanted: str) -> list[Message]:
        entries: list[Message] = (await self.http.get("/ledger", params=wanted)).json()["entries"]
        return entries

    async def faults(self, *rules: Message) -> None:
        assert (await self.http.put("/faults", json=list(rules))).status_code == 200

    async def end(self) -> None:
        await self.central.close()
        await self.http.aclose()
        if self.process.returncode is None:
            self.process.terminate()
            async with asyncio.timeout(15):
                assert await self.process.wait() == 0


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(api: Api) -> AsyncIterator[str]:
    sessions: set[Session] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Session(api.handle, sessions), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for session in list(sessions):
            session.abort()


async def start(api: Api, deliver_url: str, folder: Path, **config: Any) -> Lab:
    values = {"port": 0, "deliver_url": deliver_url, "folder": str(folder), **config}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, msgspec.json.encode(values).decode(), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(15):
        url = (await process.stdout.readline()).decode().strip()
    assert url, "the lab did not start"
    return Lab(process, url, api, folder)


@contextlib.asynccontextmanager
async def running(folder: Path, **config: Any) -> AsyncIterator[Lab]:
    api = Api()
    async with listening(api) as deliver_url:
        lab = await start(api, deliver_url, folder, **config)
        try:
            yield lab
        finally:
            await lab.end()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with running(tmp_path) as lab:
        yield lab


# ------------------------------------------------------------------------------------------------------------ real scripts


async def test_a_shell_script_really_runs_and_its_result_is_published(lab: Lab) -> None:
    request = await lab.run('echo "on $SD_DEVICE_ID"; echo oops >&2; echo "$SD_EXECUTION_ID"; printf "no newline"')
    result = await lab.api.result(request.execution_id)
    assert (result["type"], result["exit_code"]) == ("SUCCESS", 0)
    said = {(message["stream"], message["content"]) for message in lab.api.of(request.execution_id, "LOG")}
    assert said == {
        ("stdout", "on dev-001"), ("stderr", "oops"), ("stdout", request.execution_id), ("stdout", "no newline"),
    }  # fmt: skip
    assert [message["seq"] for message in lab.api.of(request.execution_id)] == [1, 2, 3, 4, 5]
    for message in lab.api.of(request.execution_id):
        assert (message["task_id"], message["device_id"]) == (request.task_id, "dev-001")


async def test_output_arrives_while_the_script_still_runs(lab: Lab, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    shell = f"echo before; while [ ! -e {gate} ]; do sleep 0.05; done; echo after"
    python = f"""
import os, time
print("before")
while not os.path.exists({str(gate)!r}):
    time.sleep(0.05)
print("after")
"""
    for language, script, device in (("shell", shell, "dev-001"), ("python", python, "dev-002")):
        request = await lab.run(script, language, device=device)
        await until(lambda id=request.execution_id: lab.api.lines(id) == ["before"])  # type: ignore[misc]
        assert lab.api.of(request.execution_id, "SUCCESS", "FAILURE") == []
        gate.touch()
        assert (await lab.api.result(request.execution_id))["type"] == "SUCCESS"
        assert lab.api.lines(request.execution_id) == ["before", "after"]
        gate.unlink()


@pytest.mark.parametrize(
    ("script", "language", "code"),
    [("exit 3", "shell", 3), ("raise SystemExit(4)", "python", 4), ("1/0", "python", 1), ("kill -9 $$", "shell", 137)],
)
async def test_a_script_that_fails_says_with_which_code(lab: Lab, script: str, language: str, code: int) -> None:
    request = await lab.run(script, language)
    result = await lab.api.result(request.execution_id)
    assert (result["type"], result["exit_code"], result["error"]["code"]) == ("FAILURE", code, "EXECUTION_FAILED")


async def test_progress_lines_become_progress_messages(lab: Lab) -> None:
    request = await lab.run("echo ::progress 40 unpacking; echo ::progress 80; echo done")
    await lab.api.result(request.execution_id)
    moved = [(m["progress"], m.get("step")) for m in lab.api.of(request.execution_id, "PROGRESS")]
    assert moved == [(40, "unpacking"), (80, None)]
    assert lab.api.lines(request.execution_id) == ["done"]


async def test_unicode_junk_and_huge_lines_come_through(lab: Lab) -> None:
    script = (
        "import sys\nprint('grüße 你好 🚀')\nsys.stdout.flush()\n"
        "sys.stdout.buffer.write(b'\\xff\\xfe junk\\n')\nprint('x' * 200_000)\n"
    )
    request = await lab.run(script, "python")
    assert (await lab.api.result(request.execution_id))["type"] == "SUCCESS"
    lines = lab.api.lines(request.execution_id)
    assert lines[:2] == ["grüße 你好 🚀", "\ufffd\ufffd junk"]
    assert "".join(lines[2:]) == "x" * 200_000
    assert all(len(line) <= 65_536 for line in lines)


async def test_a_timeout_ends_the_whole_group(lab: Lab, tmp_path: Path) -> None:
    request = await lab.run(f"sleep 300 & echo $! > {tmp_path}/child; echo started; wait", timeout_seconds=1)
    result = await lab.api.result(request.execution_id)
    assert (result["type"], result["error"]["code"]) == ("FAILURE", "TIMEOUT")
    assert lab.api.lines(request.execution_id) == ["started"]
    child = int((tmp_path / "child").read_text())
    await until(lambda: not alive(child))


async def test_cancel_kills_grandchildren_even_those_that_ignore_a_polite_request(lab: Lab, tmp_path: Path) -> None:
    script = f"trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & echo $! > {tmp_path}/child; echo started; wait"
    request = await lab.run(script)
    await until(lambda: lab.api.lines(request.execution_id) == ["started"])
    assert await lab.central.cancel(request.execution_id) == "will_try"
    assert (await lab.api.result(request.execution_id))["type"] == "CANCELED"
    child = int((tmp_path / "child").read_text())
    await until(lambda: not alive(child))
    assert await lab.central.cancel(request.execution_id) == "will_try"
    assert await lab.central.cancel(new_id()) == "never_had"
    assert [row["known"] for row in await lab.ledger(event="cancel")] == [True, True, False]


async def test_what_a_script_leaves_behind_does_not_hold_its_device(lab: Lab, tmp_path: Path) -> None:
    request = await lab.run(f"sleep 300 & echo $! > {tmp_path}/child; echo over")
    assert (await lab.api.result(request.execution_id))["type"] == "SUCCESS"
    child = int((tmp_path / "child").read_text())
    await until(lambda: not alive(child))


async def test_fifty_thousand_lines_arrive_whole_and_in_order(lab: Lab) -> None:
    request = await lab.run("for i in $(seq 50000); do echo $i; done")
    assert (await lab.api.result(request.execution_id, 60))["type"] == "SUCCESS"
    assert lab.api.lines(request.execution_id) == [str(n) for n in range(1, 50_001)]
    assert lab.api.bodies < 5000  # in batches


async def test_scripts_do_not_see_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_TEST_SECRET", "sd_x_secret")
    async with running(tmp_path) as lab:
        request = await lab.run("env | grep -c SCRIPTDISPATCH || true")
        await lab.api.result(request.execution_id)
        assert lab.api.lines(request.execution_id) == ["0"]


# ------------------------------------------------------------------------------------------------------------ taking a push


async def test_the_same_execution_twice_runs_once_and_is_answered_as_known(lab: Lab) -> None:
    request = await lab.run("echo once")
    assert (await lab.push(request)).outcome == "taken"
    await lab.api.result(request.execution_id)
    assert (await lab.push(request)).message == "central control has this execution already"
    assert lab.api.lines(request.execution_id) == ["once"]
    events = [row["event"] for row in await lab.ledger(execution_id=request.execution_id)]
    assert sorted(events) == ["accepted", "delivered", "duplicate", "duplicate", "result"]


async def test_a_busy_device_names_who_is_on_it(lab: Lab) -> None:
    first = await lab.run("sleep 60")
    second = await lab.push(lab.request("echo never"))
    assert (second.outcome, second.holder) == ("device_busy", first.execution_id)
    assert (await lab.central.device("dev-001") or {})["execution_id"] == first.execution_id
    await lab.central.cancel(first.execution_id)
    await lab.api.result(first.execution_id)
    assert (await lab.push(lab.request("echo now"))).outcome == "taken"


async def test_what_must_be_refused_is_refused_and_recorded(lab: Lab) -> None:
    high = await lab.run("echo high", fencing_token=10)
    await lab.api.result(high.execution_id)
    refusals = [
        (lab.request("echo low", fencing_token=9), "refused"),
        (lab.request("x", device="dev-999"), "device_gone"),
        (lab.request("x", sha256="0" * 64), "refused"),
        (lab.request("x", language="cobol"), "refused"),
        (lab.request("x", execution_id="../../outside"), "refused"),
    ]
    for request, outcome in refusals:
        assert (await lab.push(request)).outcome == outcome
    reasons = [row["reason"] for row in await lab.ledger(event="refused")]
    assert reasons == ["stale_fence", "unknown_device", "hash_mismatch", "unknown_language", "bad_execution_id"]
    assert (await lab.http.post("/scripts", content=b"{not json")).status_code == 422


async def test_devices_and_probe(lab: Lab) -> None:
    assert (await lab.central.device("dev-010") or {})["online"] is True
    assert await lab.central.device("dev-011") is None
    assert len((await lab.http.get("/devices")).json()["items"]) == 10
    await lab.central.probe()


# ---------------------------------------------------------------------------------------------------- delivery and restarts


async def test_messages_wait_while_the_api_is_away_and_then_come_in_order(lab: Lab) -> None:
    lab.api.down = True
    request = await lab.run("for i in 1 2 3; do echo $i; done")
    await until(lambda: not (lab.folder / "executions" / request.execution_id).exists())
    lab.api.down = False
    await lab.api.result(request.execution_id)
    assert lab.api.lines(request.execution_id) == ["1", "2", "3"]


async def test_one_message_that_the_api_refuses_does_not_hold_up_its_neighbours(lab: Lab) -> None:
    lab.api.refuse = True
    request = await lab.run("echo before; echo refuse me; echo after")
    assert (await lab.api.result(request.execution_id))["type"] == "SUCCESS"
    assert lab.api.lines(request.execution_id) == ["before", "after"]
    assert (await lab.http.get("/healthz")).json()["rejected"] == 1


async def test_a_script_waits_when_nobody_takes_its_output(lab: Lab) -> None:
    lab.api.down = True
    request = await lab.run("for i in $(seq 200000); do echo $i; done; echo end")
    waiting = 0
    async with asyncio.timeout(30):
        while waiting < 50_000:
            waiting = (await lab.http.get("/healthz")).json()["outbox"]
            await asyncio.sleep(0.05)
    assert waiting < 120_000  # what was on its way when the limit was met, not all 200,000
    assert (await lab.http.get("/healthz")).json()["running"] == 1
    lab.api.down = False
    assert (await lab.api.result(request.execution_id, 60))["type"] == "SUCCESS"
    assert len(lab.api.lines(request.execution_id)) == 200_001


async def test_a_killed_lab_reports_what_it_had_when_it_comes_back(tmp_path: Path) -> None:
    api = Api()
    async with listening(api) as deliver_url:
        lab = await start(api, deliver_url, tmp_path)
        request = await lab.run(f"echo $$ > {tmp_path}/shell; echo started; sleep 300")
        await until(lambda: api.lines(request.execution_id) == ["started"])
        shell = int((tmp_path / "shell").read_text())
        lab.process.send_signal(signal.SIGKILL)
        await lab.process.wait()
        await lab.central.close()
        again = await start(api, deliver_url, tmp_path)
        result = await api.result(request.execution_id)
        assert (result["type"], result["error"]["message"], result["seq"]) == ("FAILURE", "the lab was restarted", 1_000_000)
        await until(lambda: not alive(shell))
        assert (await again.push(request)).message == "central control has this execution already"
        assert (await again.push(again.request("x", fencing_token=1))).outcome == "refused"
        await again.end()
        third = await start(api, deliver_url, tmp_path)  # reported once, not again
        await third.end()
        assert len(api.of(request.execution_id, "FAILURE")) == 1


async def test_stopping_the_lab_ends_its_scripts(tmp_path: Path) -> None:
    async with running(tmp_path) as lab:
        request = await lab.run(f"echo $$ > {tmp_path}/shell; echo started; sleep 300")
        await until(lambda: lab.api.lines(request.execution_id) == ["started"])
    assert not alive(int((tmp_path / "shell").read_text()))


async def test_messages_are_signed_when_there_is_a_secret(tmp_path: Path) -> None:
    async with running(tmp_path, mq_secret="a secret of the test") as lab:
        request = await lab.run("echo grüße")
        await lab.api.result(request.execution_id)
        messages = lab.api.of(request.execution_id)
        assert len(messages) == 2
        assert all(verify(message, "a secret of the test") for message in messages)


# ------------------------------------------------------------------------------------------------------------------ simulate


async def test_simulated_devices_say_their_lines_and_end(tmp_path: Path) -> None:
    async with running(tmp_path, simulate=True, duration="0.01-0.05", log_lines=3) as lab:
        request = await lab.run("never run")
        assert (await lab.api.result(request.execution_id))["exit_code"] == 0
        assert lab.api.lines(request.execution_id) == ["line 1 of 3", "line 2 of 3", "line 3 of 3"]
        overlap = [await lab.run("x") for _ in range(3)]  # no busy check here: a checker shall see overlaps
        for request in overlap:
            await lab.api.result(request.execution_id)
        assert len(await lab.ledger(event="accepted")) == 4


@pytest.mark.parametrize(
    ("switch", "outcome"), [({"fail": 1.0}, "FAILURE"), ({"duplicate": 1.0}, "SUCCESS"), ({"reorder": 1.0}, "SUCCESS")]
)
async def test_the_switches_of_the_simulation(tmp_path: Path, switch: dict[str, float], outcome: str) -> None:
    async with running(tmp_path, simulate=True, duration=0.0, seed=7, **switch) as lab:
        request = await lab.run("x")
        assert (await lab.api.result(request.execution_id))["type"] == outcome
        await until(lambda: len({m["seq"] for m in lab.api.of(request.execution_id)}) == 6)
        order = [message["seq"] for message in lab.api.of(request.execution_id)]
        if "duplicate" in switch:
            assert order == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
        elif "reorder" in switch:
            assert order != sorted(order)
        else:
            assert order == [1, 2, 3, 4, 5, 6]


async def test_refused_and_silent_by_chance(tmp_path: Path) -> None:
    async with running(tmp_path / "a", simulate=True, refuse=1.0) as lab:
        assert (await lab.push(lab.request("x"))).outcome == "refused"
    async with running(tmp_path / "b", simulate=True, silent=1.0, duration=0.0) as lab:
        request = await lab.run("x")
        assert await lab.ledger(event="result") == []
        assert lab.api.of(request.execution_id) == []


async def test_a_simulated_execution_can_be_canceled(tmp_path: Path) -> None:
    async with running(tmp_path, simulate=True, duration=60.0) as lab:
        request = await lab.run("x")
        assert await lab.central.cancel(request.execution_id) == "will_try"
        assert (await lab.api.result(request.execution_id))["type"] == "CANCELED"


# -------------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("mode", ["close", "reset", "half_header"])
async def test_a_push_that_is_carried_out_but_not_answered_is_unknown(tmp_path: Path, mode: str) -> None:
    async with running(tmp_path, simulate=True, duration=0.0) as lab:
        await lab.faults({"mode": mode, "count": 1})
        request = lab.request("x")
        assert (await lab.push(request)).outcome == "unknown"
        assert (await lab.api.result(request.execution_id))["type"] == "SUCCESS"
        assert (await lab.http.get("/faults")).json()["rules"][0]["fired"] == 1
        assert (await lab.push(lab.request("y"))).outcome == "taken"  # the count is used up


async def test_status_faults_hit_only_the_devices_they_name(tmp_path: Path) -> None:
    async with running(tmp_path, simulate=True, duration=0.0) as lab:
        await lab.faults({"mode": "status", "status": 503, "retry_after": 2, "devices": ["dev-002"]})
        hit = await lab.push(lab.request("x", device="dev-002"))
        assert (hit.outcome, hit.retry_after_s) == ("wait", 2.0)
        assert (await lab.push(lab.request("x", device="dev-003"))).outcome == "taken"
        await lab.faults({"mode": "redirect", "location": "http://169.254.169.254/"})
        assert (await lab.push(lab.request("x"))).outcome == "misconfigured"
        await lab.http.delete("/faults")
        assert (await lab.push(lab.request("x"))).outcome == "taken"
        assert (await lab.http.put("/faults", json={"mode": "no such"})).status_code == 422


async def test_connections_that_the_server_closes_while_idle_cause_no_false_failure(tmp_path: Path) -> None:
    """A close that crosses the request on the wire cannot be told from one after it: then, and only then, unknown."""
    async with running(tmp_path, simulate=True, duration=0.0) as lab:
        await lab.faults({"mode": "idle_close", "after_s": 0.02})
        outcomes: dict[str, str] = {}
        for n in range(100):
            request = lab.request("x")
            outcomes[request.execution_id] = (await lab.push(request)).outcome
            await asyncio.sleep(0.02 + 0.0002 * (n % 10 - 5))  # right around the moment of the close
        assert set(outcomes.values()) <= {"taken", "unknown"}
        assert list(outcomes.values()).count("taken") > 80
        accepted = [row["execution_id"] for row in await lab.ledger(event="accepted")]
        assert len(accepted) == len(set(accepted))
        assert {execution_id for execution_id, outcome in outcomes.items() if outcome == "taken"} <= set(accepted)
        assert (await lab.http.get("/faults")).json()["rules"][0]["fired"] >= 80


@pytest.mark.parametrize(
    ("mode", "types"),
    [
        ("terminal_first", ["SUCCESS", *["LOG"] * 5]),
        ("triple", [*["LOG"] * 15, *["SUCCESS"] * 3]),
        ("contradict", [*["LOG"] * 5, "SUCCESS", "FAILURE"]),
    ],
)
async def test_message_orders_that_try_a_consumer(tmp_path: Path, mode: str, types: list[str]) -> None:
    async with running(tmp_path, simulate=True, duration=0.0) as lab:
        await lab.faults({"messages": mode})
        request = await lab.run("x")
        await until(lambda: len(lab.api.of(request.execution_id)) == len(types))
        assert [message["type"] for message in lab.api.of(request.execution_id)] == types


async def test_anything_can_be_published_through_the_outbox(tmp_path: Path) -> None:
    async with running(tmp_path, simulate=True, mq_secret="secret") as lab:
        odd: list[Any] = [{"execution_id": "e", "type": "LOG"}]
        assert (await lab.http.post("/publish", json={"messages": odd, "sign": False})).status_code == 202
        await until(lambda: len(lab.api.messages) == 1)
        assert lab.api.messages == odd


async def test_a_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path / "a") as lab:
        port = int(lab.url.rpartition(":")[2])
        config = msgspec.json.encode({"port": port, "folder": str(tmp_path / "b")}).decode()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, config, stderr=asyncio.subprocess.PIPE)
        _, stderr = await process.communicate()
        assert process.returncode != 0
        assert f"cannot listen on 127.0.0.1:{port}" in stderr.decode().splitlines()[-1]


@pytest.mark.parametrize(
    "wrong", [{"fail": 1.5}, {"duration": "soon"}, {"duration": "2-1"}, {"duration": -1.0}, {"devices": -1}]
)
def test_a_wrong_switch_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"--{next(iter(wrong))}"):
        LabConfig(**wrong)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and os.path.exists(f"/proc/{pid}")
    except psutil.NoSuchProcess:
        return False
