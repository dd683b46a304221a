"""The commands against the real API: what they print, as JSON and as text, and their exit codes."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scriptdispatch.cli import complete
from scriptdispatch.cli.main import run
from scriptdispatch.client import Client
from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.model import Quarantined
from scriptdispatch.ids import new_id
from scriptdispatch.locks.port import Claim
from tests.server_process import Server
from tests.unit.cli_server import Api, serving
from tests.unit.test_client import free_port

SCRIPT = {"language": "shell", "content": "echo hi"}


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Keyboard(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Said:
        self._capsys.readouterr()
        code = run(args)
        out, err = self._capsys.readouterr()
        return Said(code, out, err)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture
def cli(api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SCRIPTDISPATCH_URL", api.url)
    return Cli(capsys)


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with Client(api.url) as client:
        yield client


def test_create_prints_one_line_with_the_whole_id_when_piped(cli: Cli, client: Client, tmp_path: Path) -> None:
    (tmp_path / "fix.sh").write_text("echo hi")
    said = cli("task", "create", "--file", str(tmp_path / "fix.sh"), "--label", "site=sh-1", "--param", "a=1")
    assert said.code == 0
    mark, word, id, *rest = said.out.split()
    assert (mark, word, rest) == ("✓", "Created", ["fix.sh"])
    task = client.get(id)
    assert (task["name"], task["labels"], task["params"]) == ("fix.sh", {"site": "sh-1"}, {"a": "1"})
    assert task["script"] == {**task["script"], "language": "shell", "content": "echo hi"}


def test_create_reads_the_script_from_stdin(cli: Cli, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("#!/usr/bin/env python3\nprint(1)"))
    task = cli("task", "create", "--file", "-", "--name", "from stdin", "--json").json
    assert client.get(task["id"])["script"]["language"] == "python"


def test_create_passes_every_option_on(cli: Cli, client: Client) -> None:
    args = "--script-text true --language shell --priority high --timeout-seconds 60 --max-retries 5 --retry-delay 2s"
    more = "--retry-strategy exponential --backoff-rate 3 --dedupe-key every-option --at 2027-01-01T00:00:00Z"
    task = cli("task", "create", *args.split(), *more.split(), "--secret", "pw=secret-word", "--json").json
    assert (task["priority"], task["timeout_seconds"], task["dedupe_key"]) == ("high", 60, "every-option")
    assert task["run_at"] == "2027-01-01T00:00:00.000Z"
    retry = task["retry"]
    assert (retry["strategy"], retry["max_retries"], retry["delay_seconds"], retry["backoff_rate"]) == (
        "exponential",
        5,
        2,
        3,
    )
    assert task["params"] == {"pw": "***"}
    again = cli("task", "create", *args.split(), *more.split())
    assert again.code == 5
    assert "every-option" in again.err or "dedupe_key" in again.err


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["task", "create"], "--file"),
        (["task", "create", "--file", "a", "--script-text", "b"], "--file"),
        (["task", "create", "--file", "/does/not/exist.sh"], "/does/not/exist.sh"),
        (["task", "create", "--script-text", "#!/usr/bin/perl"], "--language"),
        (["task", "create", "--script-text", "true", "--language", "perl"], "script.language"),
        (["task", "create", "--script-text", "true", "--language", "shell", "--param", "x"], "--param"),
        (["task", "create", "--script-text", "true", "--language", "shell", "--at", "soon"], "--at"),
        (["task", "create", "--script-text", "true", "--language", "shell", "--priority", "top"], "priority"),
        (["task", "create", "--script-text", "true", "--language", "shell", "--wait", "--timeout", "x"], "--timeout"),
        (["task", "list", "--status", "bogus"], "--status"),
        (["task", "list", "--limit", "0"], "--limit"),
        (["task", "list", "--url", "foo"], "--url: must start with http://"),
        (["task", "logs"], "ID"),
        (["task", "nonsense"], "nonsense"),
        (["device", "unlock", "dev-001"], "--reason"),
        (["device", "unlock", "dev-001", "--reason", "x"], "--yes"),
        (["task", "cancel", "deadbeef", "--force"], "--yes"),
        (["device", "list", "--state", "odd"], "--state"),
        (["token", "create", "--name", "x"], "--scope"),
        (["token", "create", "--name", "x", "--scope", "task:fly"], "task:fly"),
        (["quarantine", "delete", "x"], "--yes"),
        (["config", "--set", "worker=1"], "did you mean workers"),
        (["stats", "--colour"], "--colour"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_line_that_names_it(cli: Cli, client: Client, args: list[str], names: str) -> None:
    before = len(client.tasks(limit=500)["items"])
    said = cli(*args)
    assert said.code == 2
    assert said.out == ""
    assert names in said.err
    assert said.err.count("\n") == 1
    assert len(client.tasks(limit=500)["items"]) == before


def test_an_unknown_task_is_exit_4_and_as_json_a_problem_on_stderr(cli: Cli) -> None:
    for command in (["show"], ["logs"], ["cancel"]):
        said = cli("task", *command, "deadbeef", "--json")
        assert (said.code, said.out) == (4, "")
        assert json.loads(said.err)["code"] == "task_not_found"


def test_no_server_is_exit_6_and_says_what_to_do(cli: Cli) -> None:
    said = cli("task", "list", "--url", f"http://127.0.0.1:{free_port()}")
    assert said.code == 6
    assert "scriptdispatch dev" in said.err


def test_an_error_that_never_reached_the_server_is_a_whole_problem_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    commands = {
        "usage": ["task", "list", "--limit", "0"],
        "unreachable": ["task", "list", "--url", nobody],
        "settings": ["config"],
    }
    monkeypatch.setenv("SCRIPTDISPATCH_PORT", "x")
    for code, command in commands.items():
        problem = json.loads(cli(*command, "--json").err)
        assert problem["type"] == f"urn:scriptdispatch:problem:{code}"
        assert problem["title"]
        assert problem["code"] == code
        assert problem["detail"]


def test_a_wrong_address_of_the_server_is_wrong_usage(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_URL", "foo:8080")
    said = cli("task", "list")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("✕ SCRIPTDISPATCH_URL: must start with http://")


def test_a_list_is_tab_separated_when_piped_and_ends_with_how_to_go_on(cli: Cli, client: Client) -> None:
    made = [client.create(name=f"listed {i}", script=SCRIPT, labels={"set": "list"}) for i in range(3)]
    said = cli("task", "list", "--label", "set=list", "--limit", "2")
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[0] for row in rows] == [made[2]["id"], made[1]["id"]]
    assert [row[1] for row in rows] == ["waiting", "waiting"]
    assert said.err.startswith("2 shown; --all or --cursor ")
    cursor = said.err.split("--cursor ")[1].split()[0]
    rest = cli("task", "list", "--label", "set=list", "--limit", "2", "--cursor", cursor)
    assert ([line.split("\t")[0] for line in rest.out.splitlines()], rest.err) == ([made[0]["id"]], "")
    every = cli("task", "list", "--label", "set=list", "--all", "--json").json
    assert [task["id"] for task in every["items"]] == [task["id"] for task in reversed(made)]


def test_the_words_of_the_console_are_taken_for_states(cli: Cli, client: Client) -> None:
    task = client.create(name="gone", script=SCRIPT, labels={"set": "states"})
    client.cancel(task["id"])
    assert cli("task", "list", "--label", "set=states", "--status", "sent,retry,canceled", "--json").json["items"][0]["id"]
    assert cli("task", "list", "--label", "set=states", "--status", "sent", "--json").json["items"] == []


def test_show_says_what_why_and_what_next(cli: Cli, client: Client) -> None:
    task = client.create(name="later", script=SCRIPT, run_at="2027-01-01T00:00:00Z")
    said = cli("task", "show", task["id"][-8:])
    assert said.code == 0
    assert said.out.splitlines()[0] == f"later   ○ Waiting   {task['id']}"
    assert "Why      Starts at 2027-01-01" in said.out
    assert f"task cancel {task['id'][-8:]}" in said.out
    assert cli("task", "show", task["id"], "--json").json["id"] == task["id"]
    assert "created" in cli("task", "show", task["id"], "--history").out


def test_cancel_says_what_became_of_it_and_conflicts_are_exit_5(cli: Cli, client: Client) -> None:
    task = client.create(name="unwanted", script=SCRIPT)
    said = cli("task", "cancel", task["id"][-8:], "--reason", "wrong site")
    assert (said.code, said.out) == (0, f"✓ Canceled {task['id'][-8:]}  unwanted\n")
    assert client.get(task["id"])["error"]["message"] == "wrong site"


def test_what_cannot_be_undone_is_asked_on_a_terminal(cli: Cli, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    task = client.create(name="to end", script=SCRIPT)
    monkeypatch.setattr("sys.stdin", Keyboard("n\nn\ny\n"))
    for command in (["task", "cancel", task["id"], "--force"], ["device", "unlock", "dev-001", "--reason", "x"]):
        said = cli(*command)
        assert (said.code, said.out) == (1, "")
        assert "?" in said.err
    assert client.get(task["id"])["status"] == "waiting"
    assert cli("task", "cancel", task["id"], "--force").out.startswith("✓ Canceled")
    assert cli("task", "cancel", client.create(name="x", script=SCRIPT)["id"], "--force", "--yes").code == 0


def test_follow_prints_the_output_and_then_the_outcome(api: Api, cli: Cli, client: Client) -> None:
    done = threading.Event()

    def device() -> None:
        """Plays the device: speaks once the task is there, then it is canceled."""
        while not done.wait(0.02):
            found = client.tasks(label="set:follow")["items"]
            if found:
                api.says(found[0]["id"], "hello", "\x1b[31mred\x1b[0m")
                api.says(found[0]["id"], "oops", first_seq=3, stream="stderr")
                client.cancel(found[0]["id"], reason="enough")
                return

    player = threading.Thread(target=device, daemon=True)
    player.start()
    said = cli("task", "create", "--script-text", "x", "--language", "shell", "--label", "set=follow", "--follow")
    done.set()
    player.join(10)
    lines = said.out.splitlines()
    assert said.code == 1
    assert lines[0].startswith("✓ Created ")
    assert lines[1:4] == ["hello", "red", "oops"]
    assert lines[4] == "⊘ Canceled   CANCELED: enough"


def test_time_over_is_exit_124_and_the_task_goes_on(cli: Cli, client: Client) -> None:
    said = cli("task", "create", "--script-text", "x", "--language", "shell", "--wait", "--timeout", "200ms")
    assert said.code == 124
    assert "goes on" in said.err
    assert client.get(said.out.split()[2])["status"] == "waiting"


def test_interrupted_watching_is_exit_130_and_leaves_the_task(api: Api, client: Client) -> None:
    environment = {**os.environ, "SCRIPTDISPATCH_URL": api.url}
    command = [
        sys.executable,
        "-m",
        "scriptdispatch",
        "task",
        "create",
        "--script-text",
        "x",
        "--language",
        "shell",
        "--follow",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        id = process.stdout.readline().split()[2]
        process.stderr.readline()  # its state was told: it is watching
        process.send_signal(2)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "goes on" in err
    assert "Traceback" not in err
    assert client.get(id)["status"] == "waiting"


def test_logs_keep_order_take_a_tail_and_are_one_json_a_line(api: Api, cli: Cli, client: Client) -> None:
    task = client.create(name="log", script=SCRIPT)
    api.says(task["id"], "one", "two\x1b[2J", "three")
    assert cli("task", "logs", task["id"]).out == "one\ntwo\nthree\n"
    assert cli("task", "logs", task["id"], "--tail", "1").out == "three\n"
    assert cli("task", "logs", task["id"], "--raw", "--tail", "2").out == "two\x1b[2J\nthree\n"
    rows = [json.loads(line) for line in cli("task", "logs", task["id"], "--json").out.splitlines()]
    assert [row["content"] for row in rows] == ["one", "two\x1b[2J", "three"]


def test_a_batch_tells_lines_that_failed_and_creates_the_rest(cli: Cli, client: Client, tmp_path: Path) -> None:
    good = json.dumps({"name": "batched", "script": SCRIPT, "labels": {"set": "batch"}})
    bad = json.dumps({"name": "batched", "script": SCRIPT, "colour": "red"})
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join([good, "", bad, "{junk", good]))
    said = cli("task", "batch", str(file))
    assert said.code == 1
    assert said.out.startswith("✓ 2 created · ✕ 2 failed: line 3 ")
    assert "colour" in said.out
    assert "line 4 validation_error not JSON" in said.out
    assert len(client.tasks(label="set:batch")["items"]) == 2
    outcome = cli("task", "batch", str(file), "--json").json
    assert (outcome["created"], outcome["failed"]) == (2, 2)
    assert [item["index"] for item in outcome["items"]] == [0, 2, 3, 4]


def test_the_same_batch_under_one_key_is_created_once(cli: Cli, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"name": "once", "script": SCRIPT, "labels": {"set": "key"}}))
    for _ in range(2):
        assert cli("task", "batch", str(file), "--idempotency-key", "nightly").out == "✓ 1 created\n"
    assert len(client.tasks(label="set:key")["items"]) == 1


def test_the_other_lists_answer_also_when_empty(cli: Cli) -> None:
    for command in (["device", "list"], ["worker", "list"], ["node", "list"], ["quarantine", "list"]):
        said = cli(*command)
        assert (said.code, said.out) == (0, "")
        assert cli(*command, "--json").json["items"] == []
    assert cli("stats").code == 0
    assert set(cli("stats", "--json").json) >= {"counts", "ready", "failure_rate"}
    assert cli("reconcile").out.startswith("✓ Reconciled")


def test_every_list_of_pages_can_be_read_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli, now = Cli(capsys), SystemClock().now()
    with serving(tmp_path) as api:
        monkeypatch.setenv("SCRIPTDISPATCH_URL", api.url)
        odd = [Quarantined(id=f"q-{i}", reason="wrong", detail="x", body=b"x", at=now) for i in range(3)]
        api.run(api.backends.store.quarantine(odd))
        claims = [Claim(device_id=f"dev-{i}", execution_id=new_id(), task_id=new_id(), ttl_s=3600) for i in range(3)]
        api.run(api.backends.locks.set_intact())
        api.run(api.backends.locks.acquire(claims))
        for command in (["quarantine", "list"], ["device", "list"]):
            whole = cli(*command, "--all").out.splitlines()
            first = cli(*command, "--limit", "2")
            assert (len(whole), first.out.splitlines()) == (3, whole[:2])
            assert first.err.startswith("2 shown; --all or --cursor ")
            cursor = first.err.split("--cursor ")[1].split()[0]
            assert cli(*command, "--cursor", cursor).out.splitlines() == whole[2:]


def test_a_free_device_has_no_lock_to_break(cli: Cli) -> None:
    assert cli("device", "unlock", "dev-001", "--reason", "x", "--yes").code == 4


def test_version_is_fast_and_needs_no_server(cli: Cli) -> None:
    assert cli("version").out.startswith("scriptdispatch ")
    assert "version" in cli("version", "--json").json


def test_config_masks_secrets_and_says_where_values_come_from(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scriptdispatch.toml").write_text("workers = 3\nport = 9\n")
    monkeypatch.setenv("SCRIPTDISPATCH_PORT", "8181")
    monkeypatch.setenv("SCRIPTDISPATCH_CENTRAL_TOKEN", "very-secret")
    found = cli("config", "--set", "consumers=2", "--json")
    assert "very-secret" not in found.out
    values = found.json
    assert values["workers"] == {"value": 3, "from": "scriptdispatch.toml"}
    assert values["port"] == {"value": 8181, "from": "SCRIPTDISPATCH_PORT"}
    assert values["consumers"] == {"value": 2, "from": "flag"}
    assert values["central_token"] == {"value": "***", "from": "SCRIPTDISPATCH_CENTRAL_TOKEN"}
    assert values["host"]["from"] == "default"


def test_config_and_doctor_take_the_same_file(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".scriptdispatch").mkdir()
    (tmp_path / ".scriptdispatch" / "settings.toml").write_text('store_url = "sqlite:////d/s.db"\nport = 9\n')
    checks = cli("doctor", "--json").json["checks"]
    assert checks[0]["text"] == "from .scriptdispatch/settings.toml"
    values = cli("config", "--json").json
    assert values["store_url"] == {"value": "sqlite:////d/s.db", "from": ".scriptdispatch/settings.toml"}
    assert values["port"] == {"value": 9, "from": ".scriptdispatch/settings.toml"}
    assert "/d/s.db" in checks[1]["text"]
    other = cli("config", "--set", "store_url=sqlite:///other.db", "--json").json
    assert (other["store_url"]["from"], other["port"]["from"]) == ("flag", "default")


def test_no_help_text_loses_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes what looks like a tag of its own out of the text."""
    import re

    import typer

    from scriptdispatch.cli.main import app

    def texts(command: Any) -> Iterator[str]:
        yield command.help or ""
        yield from (getattr(one, "help", None) or "" for one in command.params)
        for part in getattr(command, "commands", {}).values():
            yield from texts(part)

    found = [text for text in texts(typer.main.get_command(app)) if re.search(r"\[[a-z#/@]", text)]
    assert found == []


def test_a_bad_setting_is_wrong_usage_that_names_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_WORKERS", "many")
    for command in ("config", "serve", "web", "dev"):
        said = cli(command)
        assert said.code == 2
        assert "SCRIPTDISPATCH_WORKERS" in said.err


def test_doctor_names_what_is_wrong_and_what_to_do(api: Api, cli: Cli, tmp_path: Path) -> None:
    said = cli("doctor", "--store-url", f"sqlite:///{tmp_path}/none.db")
    assert said.code == 1
    assert "✕ store" in said.out
    assert "✕ central" in said.out
    assert "✓ api" in said.out
    assert "→" in said.out
    assert not (tmp_path / "none.db").exists()


def test_doctor_and_serve_refuse_a_queue_strategy_that_cannot_be_loaded(
    api: Api, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_QUEUE_STRATEGY", "nowhere:order")
    first = cli("doctor", "--store-url", api.store_url, "--json").json["checks"][0]
    assert (first["part"], first["ok"]) == ("settings", False)
    assert "queue_strategy 'nowhere:order' cannot be loaded" in first["text"]
    refused = cli("serve", "--store-url", api.store_url)
    assert refused.code == 2
    assert "queue_strategy 'nowhere:order'" in refused.err


def test_doctor_warns_of_a_mongod_that_is_no_replica_set(start_server: Callable[..., Server], cli: Cli) -> None:
    alone = start_server("mongo", alone=True).url.replace("/?", "/doctor?")
    servers = ("--set", "queue_url=redis://127.0.0.1:1", "--set", "mq_url=pulsar://127.0.0.1:1")
    checks = {row["part"]: row for row in cli("doctor", "--store-url", alone, *servers, "--json").json["checks"]}
    assert checks["store"]["ok"] is True
    assert "rs.initiate()" in checks["store"]["warning"]
    said = cli("doctor", "--store-url", alone, *servers).out
    assert "! store" in said
    assert "rs.initiate()" in said


def test_doctor_checks_each_part_of_a_store_that_is_there(api: Api, cli: Cli) -> None:
    checks = {row["part"]: row for row in cli("doctor", "--store-url", api.store_url, "--json").json["checks"]}
    assert {name for name, row in checks.items() if row["ok"]} == {
        "settings", "store", "queue", "stream", "clock", "access", "api",
    }  # fmt: skip
    assert "serve" in checks["node"]["advice"]


def test_the_shell_completes_ids_states_and_devices_and_nothing_without_a_server(
    api: Api, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = client.create(name="to complete", script=SCRIPT)
    monkeypatch.setenv("SCRIPTDISPATCH_URL", api.url)
    assert (task["id"][-8:], "waiting to complete") in list(complete.tasks(task["id"][-8:-4]))
    assert list(complete.states("failed,wait")) == ["failed,waiting"]
    assert list(complete.devices("no-such")) == []
    monkeypatch.setenv("SCRIPTDISPATCH_URL", f"http://127.0.0.1:{free_port()}")
    assert list(complete.tasks("")) == []


class TestTokens:
    """On a server of their own: the first token closes it."""

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'test.db'}"

    def test_the_first_token_is_made_on_the_store_and_opens_the_closed_api(
        self, tmp_path: Path, store_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cli = Cli(capsys)
        made = cli("token", "create", "--local", "--store-url", store_url, "--name", "me", "--scope", "admin", "--json").json
        with serving(tmp_path) as api:
            monkeypatch.setenv("SCRIPTDISPATCH_URL", api.url)
            refused = cli("task", "list")
            assert refused.code == 3
            assert "SCRIPTDISPATCH_TOKEN" in refused.err
            monkeypatch.setenv("SCRIPTDISPATCH_TOKEN", made["token"])
            assert cli("task", "list").code == 0
            reader = cli("token", "create", "--name", "reader", "--scope", "task:read", "--expires", "30d", "--json").json
            assert cli("task", "list", "--token", reader["token"]).code == 0
            assert cli("token", "list", "--token", reader["token"]).code == 3
            writer = cli("token", "create", "--name", "writer", "--scope", "task:write", "--json").json
            for owner in (made, writer, writer):
                assert (
                    cli("task", "create", "--script-text", "x", "--language", "shell", "--token", owner["token"]).code == 0
                )
            listed = cli("token", "list")
            assert reader["token"] not in listed.out
            assert [row.split("\t")[1] for row in listed.out.splitlines()] == ["valid"] * 3
            said = cli("token", "revoke", writer["id"], "--cancel-tasks", "--yes")
            assert said.out == f"✓ Revoked token {writer['id']}, 2 tasks canceled\n"
            tasks = cli("task", "list", "--json").json["items"]
            assert [(task["created_by"], task["status"]) for task in tasks] == [
                ("writer", "canceled"), ("writer", "canceled"), ("me", "waiting"),
            ]  # fmt: skip
            assert cli("token", "revoke", reader["id"], "--yes").out == f"✓ Revoked token {reader['id']}\n"
            assert cli("task", "list", "--token", reader["token"]).code == 3
