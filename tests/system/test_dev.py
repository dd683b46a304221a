"""`scriptdispatch dev` as a person runs it: real processes, a real lab, a terminal's signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "scriptdispatch"]
PARTS = ("web", "serve", "lab")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(holds: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


class Dev:
    """One `dev` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.lab_port = folder, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said = folder / "said.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def start(self, *more: str) -> "Dev":
        args = ["dev", "--port", str(self.port), "--lab-port", str(self.lab_port), "--workers", "1", *more]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SCRIPTDISPATCH_")}
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*COMMAND, *args], cwd=self.folder, stdout=said, stderr=said, env=environment, start_new_session=True
            )
        until(lambda: "Ctrl-C" in self.text() or self.process.poll() is not None, "dev is ready")  # type: ignore[union-attr]
        assert self.process.poll() is None, self.text()
        self._family = self.family()
        return self

    def text(self) -> str:
        return self.said.read_text()

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def part(self, name: str) -> psutil.Process:
        """The child that runs this command; it may have renamed itself."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        titles = {"serve": "master"}
        found = [
            one for one in children if name in one.cmdline() or titles.get(name, name) in " ".join(one.cmdline()).split()
        ]
        assert len(found) == 1, (name, [one.cmdline() for one in children])
        return found[0]

    def cli(self, *args: str, limit_s: float = 30) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SCRIPTDISPATCH_URL": self.url}
        return subprocess.run(
            [*COMMAND, *args], cwd=self.folder, capture_output=True, text=True, timeout=limit_s, env=environment, check=False
        )

    def nobody_is_left(self) -> bool:
        return not [one for one in self._family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self._family = self.family()
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        until(self.nobody_is_left, "all children have ended")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One that runs, for tests that leave it running."""
    dev = Dev(tmp_path_factory.mktemp("house"))
    try:
        yield dev.start()
    finally:
        dev.end()


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    dev = Dev(tmp_path)
    try:
        yield dev
    finally:
        dev.end()


def test_everything_is_up_in_seconds_says_where_and_its_example_works(dev: Dev) -> None:
    began = time.monotonic()
    dev.start()
    took_s = time.monotonic() - began
    assert took_s < 15, f"{took_s:.1f} s"  # 5 s on a machine that does nothing else
    text = dev.text()
    assert f"✓ web   {dev.url}" in text
    assert "✓ node  1 worker, 1 consumer" in text
    assert f"✓ lab   http://127.0.0.1:{dev.lab_port}   10 devices: dev-001 … dev-010" in text
    example = re.search(r"task create (.*)", text)
    assert example is not None
    ran = dev.cli("task", "create", *example[1].split())
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[1:6] == ["hello from dev-001", "step 1", "step 2", "step 3", "done"]
    assert re.fullmatch(r"✓ Success +exit 0 · run .*", lines[6])
    healthy = dev.cli("doctor")
    assert healthy.returncode == 0, healthy.stdout
    assert "✕" not in healthy.stdout


def test_output_is_printed_while_the_script_still_runs(house: Dev) -> None:
    gate = house.folder / "gate"
    script = f"echo first; while [ ! -e {gate} ]; do sleep 0.05; done; echo last"
    environment = {**os.environ, "SCRIPTDISPATCH_URL": house.url}
    args = ["task", "create", "--device", "dev-001", "--language", "shell", "--script-text", script, "--follow"]
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("✓ Created")
        # The script ends only after this line was seen: it came while the script ran.
        assert process.stdout.readline() == "first\n"
        gate.touch()
        assert process.stdout.readline() == "last\n"
        assert process.stdout.readline().startswith("✓ Success")
    assert process.returncode == 0


def test_the_exit_code_tells_how_the_script_ended(house: Dev) -> None:
    args = ["task", "create", "--device", "dev-002", "--language", "shell", "--max-retries", "0", "--wait", "--script-text"]
    assert house.cli(*args, "true").returncode == 0
    failed = house.cli(*args, "exit 7")
    assert failed.returncode == 1
    assert "exit 7" in failed.stdout
    assert "EXECUTION_FAILED" in failed.stdout
    assert house.cli("task", "create", "--device", "nowhere", "--language", "shell", "--script-text", "true").returncode == 4


def test_a_busy_port_is_one_line_with_what_to_do(dev: Dev) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = other.getsockname()[1]
        ran = dev.cli("dev", "--port", str(taken), "--lab-port", str(dev.lab_port))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert f"port {taken}" in ran.stderr
    assert "scriptdispatch dev --port " in ran.stderr


def test_a_second_dev_on_the_same_data_is_refused(house: Dev) -> None:
    ran = house.cli("dev", "--port", str(free_port()), "--lab-port", str(free_port()))
    assert ran.returncode == 1
    assert "another `scriptdispatch dev`" in ran.stderr
    assert house.process is not None
    assert house.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_it_stops_all_parts_and_leaves_the_data(dev: Dev, number: signal.Signals) -> None:
    dev.start()
    assert dev.process is not None
    dev.process.send_signal(number)
    assert dev.process.wait(30) == 0
    assert dev.nobody_is_left()
    assert "stopped" in dev.text()
    assert (dev.folder / ".scriptdispatch" / "scriptdispatch.db").exists()


def test_asked_twice_it_does_not_wait_for_a_part_that_hangs(dev: Dev) -> None:
    dev.start()
    assert dev.process is not None
    dev.part("serve").suspend()
    dev.process.terminate()
    until(lambda: "stopping" in dev.text(), "it began to stop")
    began = time.monotonic()
    dev.process.terminate()
    assert dev.process.wait(20) == 0
    assert time.monotonic() - began < 15  # the grace would be more than 30 s
    assert "node  does not end: killed" in dev.text()


def test_killed_it_takes_all_its_parts_along(dev: Dev) -> None:
    dev.start()
    assert dev.process is not None
    assert {part: dev.part(part).is_running() for part in PARTS} == dict.fromkeys(PARTS, True)
    dev.process.kill()
    dev.process.wait(10)
    until(dev.nobody_is_left, "the parts see the lifeline close and end")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_dies_comes_back_and_is_said(house: Dev, name: str) -> None:
    old, said = house.part(name), len(house.text())
    old.kill()
    shown = "node" if name == "serve" else name
    until(lambda: re.search(rf"{shown} +is back", house.text()[said:]) is not None, f"{shown} is back")
    assert "was ended by SIGKILL" in house.text()[said:]
    assert house.part(name).pid != old.pid
    ran = house.cli(
        "task", "create", "--device", "dev-003", "--language", "shell", "--script-text", "echo again", "--follow"
    )
    assert ran.returncode == 0, ran.stderr
    assert "again" in ran.stdout


def test_with_tokens_the_lab_still_delivers(dev: Dev) -> None:
    folder = dev.folder / ".scriptdispatch"
    folder.mkdir()
    store = f"sqlite:///{folder / 'scriptdispatch.db'}"
    made = dev.cli("token", "create", "--local", "--store-url", store, "--name", "me", "--scope", "admin")
    token = made.stdout.splitlines()[1]
    dev.start()
    args = ["task", "create", "--device", "dev-001", "--language", "shell", "--script-text", "echo closed", "--follow"]
    assert dev.cli(*args).returncode == 3
    ran = dev.cli(*args, "--token", token)
    assert ran.returncode == 0, ran.stderr
    assert "closed" in ran.stdout.splitlines()[1:2]
