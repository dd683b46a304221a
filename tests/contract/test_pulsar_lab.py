"""The lab with `--mq-url`: a real process that runs a real script and publishes what it says to a real broker."""

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from scriptdispatch.central.lab import LabConfig
from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import SettingsError
from scriptdispatch.ids import new_id
from tests.contract.pulsar_library import need_pulsar

need_pulsar()

import pulsar  # noqa: E402

from scriptdispatch.mq.pulsar import PulsarStream  # noqa: E402
from tests.contract.pulsar_rig import new_topic  # noqa: E402

MAIN = """
import sys, msgspec
from scriptdispatch.central.lab import LabConfig, run_lab  # noqa: E402
config = msgspec.json.decode(sys.argv[1], type=LabConfig, dec_hook=lambda kind, value: kind(value))
run_lab(config, ready=lambda url: print(url, flush=True))
"""


class Lab:
    """The process; to be used as `async with`."""

    def __init__(self, **config: Any) -> None:
        self._config = {"port": 0, "deliver_url": None, "devices": 50, **config}

    async def __aenter__(self) -> "Lab":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, msgspec.json.encode(self._config).decode(), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            url = (await self._process.stdout.readline()).decode().strip()
        self.http = httpx.AsyncClient(base_url=url, timeout=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self._process.terminate()
        async with asyncio.timeout(30):
            assert await self._process.wait() == 0

    async def push(self, script: str, device: str) -> str:
        execution_id = new_id()
        body = {
            "execution_id": execution_id, "task_id": new_id(), "device_id": device, "language": "shell", "script": script,
            "sha256": hashlib.sha256(script.encode()).hexdigest(), "params": None, "timeout_seconds": 30, "attempt": 1,
            "fencing_token": 1,
        }  # fmt: skip
        assert (await self.http.post("/scripts", json=body)).status_code == 202
        return execution_id


async def messages_of(stream: PulsarStream, executions: set[str]) -> list[dict[str, Any]]:
    """What comes, until each execution has said how it ended."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while {row["execution_id"] for row in found if row["type"] == "SUCCESS"} != executions:
            got = await stream.receive(500, 1)
            found += [msgspec.json.decode(delivery.body) for delivery in got]
            await stream.ack(got)
    return found


async def test_what_a_script_says_goes_to_the_topic_under_its_devices_key(pulsar_url: str, tmp_path: Path) -> None:
    topic = new_topic()
    async with Lab(mq_url=pulsar_url, mq_topic=topic, folder=str(tmp_path)) as lab:
        execution = await lab.push("echo one; echo two >&2; echo three", "dev-007")
        stream = PulsarStream(pulsar_url, topic, SystemClock())
        await stream.open()
        messages = await messages_of(stream, {execution})
        assert {row["device_id"] for row in messages} == {"dev-007"}
        assert sorted(row["seq"] for row in messages) == list(range(1, len(messages) + 1))
        assert sorted(row["content"] for row in messages if row["type"] == "LOG") == ["one", "three", "two"]
        assert (await lab.http.get("/healthz")).json()["delivered"] == len(messages)
        await stream.close()
    assert _keys(pulsar_url, topic) == {"dev-007"}


async def test_a_simulating_lab_publishes_every_line_once(pulsar_url: str, tmp_path: Path) -> None:
    topic = new_topic()
    config = {"simulate": True, "duration": 0.05, "log_lines": 4, "folder": str(tmp_path)}
    async with Lab(mq_url=pulsar_url, mq_topic=topic, **config) as lab:
        executions = {await lab.push("", f"dev-{n:03d}") for n in range(1, 51)}
        stream = PulsarStream(pulsar_url, topic, SystemClock())
        await stream.open()
        messages = await messages_of(stream, executions)
        assert len(messages) == len({(row["execution_id"], row["seq"]) for row in messages}) == 50 * 5
        await stream.close()


async def test_a_message_too_large_for_the_broker_is_refused_and_its_neighbours_arrive(
    pulsar_url: str, tmp_path: Path
) -> None:
    topic = new_topic()
    async with Lab(mq_url=pulsar_url, mq_topic=topic, simulate=True, folder=str(tmp_path)) as lab:
        rows: list[dict[str, Any]] = [{"n": 1}, {"n": 2, "text": "x" * 6_000_000}, {"n": 3}]
        assert (await lab.http.post("/publish", json={"messages": rows})).status_code == 202
        stream = PulsarStream(pulsar_url, topic, SystemClock())
        await stream.open()
        numbers: list[int] = []
        async with asyncio.timeout(20):
            while len(numbers) < 2:
                numbers += [msgspec.json.decode(delivery.body)["n"] for delivery in await stream.receive(10, 1)]
        assert sorted(numbers) == [1, 3]
        await stream.close()
        assert (await lab.http.get("/healthz")).json()["rejected"] == 1


def test_an_address_that_is_not_pulsars_is_refused() -> None:
    with pytest.raises(SettingsError, match="--mq-url"):
        LabConfig(mq_url="kafka://somewhere")


def _keys(url: str, topic: str) -> set[str]:
    client = pulsar.Client(url)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    keys = set()
    while reader.has_message_available():
        keys.add(reader.read_next(5000).partition_key())
    client.close()
    return keys
