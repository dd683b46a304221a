"""Settings: flags over environment over file; what is wrong is named. And the table in docs/operations.md is this one."""

import os
import re
from pathlib import Path

import pytest

from scriptdispatch.errors import SettingsError
from scriptdispatch.settings import Settings, check_bind, load, masked

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
TOKEN = "sd_ops_0123456789abcdef"


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("SCRIPTDISPATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_the_defaults_need_nothing() -> None:
    settings = load()
    assert (settings.store_url, settings.host, settings.port) == ("sqlite:///scriptdispatch.db", "127.0.0.1", 8080)
    assert settings.database == Path.cwd() / "scriptdispatch.db"


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scriptdispatch.toml").write_text("port = 1\nworkers = 2\nconsumers = 3\n")
    monkeypatch.setenv("SCRIPTDISPATCH_PORT", "10")
    monkeypatch.setenv("SCRIPTDISPATCH_WORKERS", "20")
    settings = load({"port": 100, "workers": None})
    assert (settings.port, settings.workers, settings.consumers) == (100, 20, 3)


def test_an_absolute_path_has_four_slashes() -> None:
    assert load({"store_url": "sqlite:////srv/data/sd.db"}).database == Path("/srv/data/sd.db")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("SCRIPTDISPATCH_WORKER", "2", "did you mean workers?"),
        ("SCRIPTDISPATCH_CENTRAL_ULR", "http://x", "did you mean central_url?"),
        ("SCRIPTDISPATCH_XYZZY", "1", "lists all of them"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, hint: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load()
    assert name in str(caught.value)
    assert hint in str(caught.value)


def test_an_unknown_key_in_the_file_is_an_error_that_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "scriptdispatch.toml").write_text("prot = 1\n")
    with pytest.raises(SettingsError, match=r"scriptdispatch\.toml: unknown setting 'prot'; did you mean port\?"):
        load()


def test_a_file_that_was_named_must_be_there_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"(?i)no such file"):
        load(file=tmp_path / "other.toml")
    (tmp_path / "bad.toml").write_text("port 1")
    with pytest.raises(SettingsError, match=r"bad\.toml"):
        load(file=tmp_path / "bad.toml")


@pytest.mark.parametrize("name", ["SCRIPTDISPATCH_URL", "SCRIPTDISPATCH_TOKEN", "SCRIPTDISPATCH_TEST_ANYTHING"])
def test_what_belongs_to_the_client_or_to_tests_is_no_setting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "many"), ("port", "70000"), ("workers", "0"), ("workers", "-1"), ("balance", "random"),
        ("check_interval", "0"), ("check_interval", "nan"), ("execution_timeout", "604801"), ("log_level", "loud"),
        ("store_url", "postgres://x"), ("queue_url", "amqp://x"), ("mq_url", "kafka://x"), ("central_url", "ftp://x"),
        ("api_tokens", "secret"), ("api_tokens", "sd_ops_short"), ("queue_strategy", "lifo"), ("node_name", ""),
        ("max_log_lines", "0"), ("retention_days", "0.1"), ("central_device_path", "/x"), ("central_push_path", "scripts"),
        ("central_cancel_path", "/cancel/{device_id}"),
    ],
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SCRIPTDISPATCH_{name.upper()}", value)
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value), "one line"


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(SettingsError, match=r"^--worker-capacity: "):
        load({"worker_capacity": 0})


def test_a_bad_value_in_the_file_is_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scriptdispatch.toml").write_text('port = "x"\n')
    with pytest.raises(SettingsError, match=r"^port \(scriptdispatch\.toml\): "):
        load()
    (tmp_path / "other.toml").write_text("workers = 0\n")
    with pytest.raises(SettingsError, match=r"^workers \(.*other\.toml\): "):
        load(file=tmp_path / "other.toml")
    monkeypatch.setenv("SCRIPTDISPATCH_PORT", "y")
    with pytest.raises(SettingsError, match=r"^port \(SCRIPTDISPATCH_PORT\): "):
        load()


def test_an_empty_address_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"store_url": "mongodb://x/sd", "mq_url": "pulsar://x"}
    monkeypatch.setenv("SCRIPTDISPATCH_QUEUE_URL", "")
    with pytest.raises(SettingsError, match="queue_url must be set"):
        load(servers)
    (tmp_path / "scriptdispatch.toml").write_text('queue_url = "redis://x"\ncentral_url = ""\n')
    settings = load({**servers, "central_url": ""})
    assert (settings.queue_url, settings.central_url) == ("redis://x", None)


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(SettingsError, match="lease_ttl must be at least twice heartbeat_interval"):
        load({"lease_ttl": 3, "heartbeat_interval": 2})


def test_tokens_are_a_comma_list() -> None:
    other = "sd_ci_fedcba9876543210"
    assert load({"api_tokens": f"{TOKEN}, {other}"}).api_tokens == (TOKEN, other)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.net"])
def test_an_open_api_is_not_bound_where_others_can_reach_it(host: str) -> None:
    settings = load({"host": host})
    with pytest.raises(SettingsError, match=re.escape(host)):
        check_bind(settings, has_tokens=False)
    check_bind(settings, has_tokens=True)
    check_bind(load({"host": host, "api_tokens": TOKEN}), has_tokens=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_may_be_open(host: str) -> None:
    check_bind(load({"host": host}), has_tokens=False)


def test_secrets_are_masked_for_people() -> None:
    shown = masked(load({"central_token": "s3cret", "mq_secret": "s3cret", "api_tokens": TOKEN}))
    assert "s3cret" not in str(shown)
    assert TOKEN not in str(shown)
    assert shown["central_token"] == shown["mq_secret"] == shown["api_tokens"] == "***"


# ------------------------------------------------------------------------------------------------- docs/operations.md


def _documented() -> dict[str, str]:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", OPERATIONS.read_text(), re.MULTILINE)
    return dict(rows)


def test_the_operations_page_has_every_setting_and_no_other() -> None:
    assert list(_documented()) == list(Settings.model_fields)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_operations_page_says_the_default(name: str) -> None:
    field = Settings.model_fields[name]
    told = _documented()[name]
    if field.default_factory is not None:
        assert told in ("number of CPUs", "host name")
    elif field.default is None or field.default == ():
        assert told == "none"
    elif isinstance(field.default, bool):
        assert told == f"`{str(field.default).lower()}`"
    else:
        assert told.strip("`").replace(",", "") == str(field.default)


@pytest.mark.parametrize("missing", ["queue_url", "mq_url"])
def test_a_store_that_is_not_sqlite_needs_a_queue_and_a_stream_of_its_own(missing: str) -> None:
    servers = {"store_url": "mongodb://x/sd", "queue_url": "redis://x", "mq_url": "pulsar://x"}
    load(servers)
    with pytest.raises(SettingsError, match=missing):
        load({name: url for name, url in servers.items() if name != missing})


def test_the_password_in_an_address_is_masked() -> None:
    shown = masked(
        load({"store_url": "mongodb://me:hunter2@db/sd", "queue_url": "redis://:geheim@q/0", "mq_url": "pulsar://b"})
    )
    assert shown["store_url"] == "mongodb://me:***@db/sd"
    assert shown["queue_url"] == "redis://:***@q/0"
