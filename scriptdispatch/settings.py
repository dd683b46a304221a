"""The settings: flags over environment over `scriptdispatch.toml`. Unknown or bad ones are errors that name them."""

import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from scriptdispatch.errors import SettingsError

PREFIX = "SCRIPTDISPATCH_"
FILE = "scriptdispatch.toml"
FLAG = "flag"
SHORTEST_RETENTION = 0.125  # days
NOT_SETTINGS = ("SCRIPTDISPATCH_URL", "SCRIPTDISPATCH_TOKEN")
SECRETS = ("central_token", "mq_secret", "api_tokens", "callback_secret")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
CommaList = Annotated[tuple[str, ...], NoDecode]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    store_url: str = "sqlite:///scriptdispatch.db"
    queue_url: str | None = None
    mq_url: str | None = None
    mq_topic: str = "persistent://public/default/script-execution-logs"
    mq_secret: str | None = None
    redis_prefix: str = "scriptdispatch:"
    central_url: str | None = None
    central_token: str | None = None
    central_device_path: str = "/devices/{device_id}"
    central_push_path: str = "/scripts"
    central_cancel_path: str = "/executions/{execution_id}/cancel"
    central_deduplicates: bool = False
    central_5xx_means_refused: bool = False
    device_cache_seconds: float = Field(60, ge=0, le=86_400)
    workers: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=256)
    worker_capacity: int = Field(512, ge=1, le=10_000)
    consumers: int = Field(1, ge=1, le=64)
    task_types: CommaList | None = None
    balance: Literal["device_load", "fewest", "round_robin", "consistent_hash"] = "device_load"
    queue_strategy: str = "priority"
    check_interval: Seconds = 5
    load_interval: Seconds = 300
    timeout_interval: Seconds = 600
    execution_timeout: int = Field(1800, ge=1, le=604_800)
    timeout_grace: float = Field(30, ge=0, le=86_400)
    heartbeat_interval: Seconds = 2
    lease_ttl: Seconds = 10
    shutdown_grace: float = Field(30, ge=0, le=3600)
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535)
    api_tokens: CommaList = ()
    rate_limit_per_second: float = Field(200, ge=0)
    retention_days: float = Field(30, ge=0)
    log_retention_days: float = Field(30, ge=0)
    node_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=200)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    # Limits (SPEC 4.4)
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    max_script_bytes: int = Field(1024 * 1024, ge=1)
    max_params_bytes: int = Field(64 * 1024, ge=2)
    max_log_line_bytes: int = Field(64 * 1024, ge=16)
    max_log_lines: int = Field(100_000, ge=1)

    @field_validator("api_tokens", "task_types", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("api_tokens")
    @classmethod
    def _tokens(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for token in value:
            parts = token.split("_", 2)
            if len(parts) != 3 or parts[0] != "sd" or not parts[1] or len(parts[2]) < 16:
                raise ValueError(
                    "each token is sd_<id>_<secret> with a secret of at least 16 characters: "
                    "make one with `scriptdispatch token create`"
                )
        return value

    @field_validator("queue_strategy")
    @classmethod
    def _strategy(cls, value: str) -> str:
        if value not in ("priority", "fifo") and ":" not in value:
            raise ValueError("must be priority, fifo or module:function")
        return value

    @field_validator("store_url")
    @classmethod
    def _store(cls, value: str) -> str:
        return _one_of(value, ("sqlite:///", "mongodb://", "mongodb+srv://", "memory://"))

    @field_validator("queue_url")
    @classmethod
    def _queue(cls, value: str | None) -> str | None:
        return value and _one_of(value, ("redis://", "rediss://", "memory://"))

    @field_validator("mq_url")
    @classmethod
    def _mq(cls, value: str | None) -> str | None:
        return value and _one_of(value, ("pulsar://", "pulsar+ssl://", "memory://"))

    @field_validator("central_url")
    @classmethod
    def _central(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return value.rstrip("/") if value else value

    @field_validator("central_device_path", "central_push_path", "central_cancel_path")
    @classmethod
    def _path(cls, value: str, info: ValidationInfo) -> str:
        place = {"central_device_path": "{device_id}", "central_cancel_path": "{execution_id}"}.get(
            info.field_name or "", ""
        )
        if not value.startswith("/") or place not in value:
            raise ValueError("must start with /" + (f" and have {place} where the id belongs" if place else ""))
        return value

    @field_validator("retention_days")
    @classmethod
    def _retention(cls, value: float) -> float:
        """What is remembered for an hour (fences, ended tasks) must not outlive what it is about."""
        if 0 < value < SHORTEST_RETENTION:
            raise ValueError(f"must be 0 (for ever) or at least {SHORTEST_RETENTION:g} (3 hours)")
        return value

    @model_validator(mode="after")
    def _servers(self) -> "Settings":
        """Only SQLite carries queue and stream as well."""
        if self.store_url.startswith("mongodb"):
            for name in ("queue_url", "mq_url"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} must be set when the store is not SQLite")
        return self

    @model_validator(mode="after")
    def _lease(self) -> "Settings":
        if self.lease_ttl < 2 * self.heartbeat_interval:
            raise ValueError("lease_ttl must be at least twice heartbeat_interval, or live nodes would count as dead")
        return self

    @property
    def database(self) -> Path:
        """The SQLite file; relative paths count from the working directory."""
        return Path(self.store_url.removeprefix("sqlite:///")).absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` reads the environment itself, and remembers what came from where


def _one_of(value: str, schemes: tuple[str, ...]) -> str:
    if not value.startswith(schemes):
        raise ValueError(f"must start with {', '.join(s for s in schemes if s != 'memory://')}")
    return value


class Given(NamedTuple):
    """What somebody set: "flag", the variable or the file it came from."""

    value: Any
    origin: str


def load(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """The settings in force. `flags` are those given on the command line (None values are not given)."""
    found = given(flags, file)
    try:
        return Settings(**{name: one.value for name, one in found.items()})
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(row, found) for row in error.errors())) from None


def given(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> dict[str, Given]:
    """All that is not a default. An empty address is as good as none: what ranks below it counts."""
    _refuse_unknown_environment()
    return {
        **_counting(_from_file(file), lambda name: str(file or FILE)),
        **_counting(_from_environment(), _variable),
        **_counting(flags or {}, lambda name: FLAG),
    }


def _counting(values: Mapping[str, Any], origin: Callable[[str], str]) -> dict[str, Given]:
    return {
        name: Given(value, origin(name))
        for name, value in values.items()
        if value is not None and not (name.endswith("_url") and value == "")
    }


def check_bind(settings: Settings, *, has_tokens: bool) -> None:
    """Without tokens the API is open, so only this machine may reach it."""
    if settings.host not in LOOPBACK and not (settings.api_tokens or has_tokens):
        raise SettingsError(
            f"host {settings.host} can be reached from other machines, but no token is configured: "
            "set SCRIPTDISPATCH_API_TOKENS, make one with `scriptdispatch token create`, or bind 127.0.0.1"
        )


def masked(settings: Settings) -> dict[str, Any]:
    """For people to see."""
    values = settings.model_dump(mode="json")
    return {name: _mask(name, value) for name, value in values.items()}


def _mask(name: str, value: Any) -> Any:
    if name in SECRETS and value:
        return "***"
    if name.endswith("_url") and isinstance(value, str):
        return without_password(value)
    return value


def without_password(url: str) -> str:
    """An address as it may be shown: `mongodb://user:***@host`."""
    return re.sub(r"(?<=://)([^:/@]*):[^@/]*@", r"\1:***@", url)


def _from_file(file: Path | None) -> dict[str, Any]:
    path = file or Path(FILE)
    if file is None and not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    for name in values:
        if name not in Settings.model_fields:
            raise SettingsError(f"{path}: unknown setting {name!r}{_hint(name)}")
    return values


def _from_environment() -> dict[str, Any]:
    names = {_variable(name): name for name in Settings.model_fields}
    return {names[key.upper()]: value for key, value in os.environ.items() if key.upper() in names}


def _refuse_unknown_environment() -> None:
    for key in os.environ:
        if not key.startswith(PREFIX) or key.startswith(PREFIX + "TEST_") or key in NOT_SETTINGS:
            continue
        name = key.removeprefix(PREFIX).lower()
        if name not in Settings.model_fields:
            raise SettingsError(f"unknown setting {key}{_hint(name)}")


def _hint(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name.lower(), Settings.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else "; `scriptdispatch config` lists all of them"


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _sentence(row: Any, found: Mapping[str, Given]) -> str:
    name = str(row["loc"][0]) if row["loc"] else ""
    return f"{_where(name, found)}: {row['msg'].removeprefix('Value error, ')}"


def _where(name: str, found: Mapping[str, Given]) -> str:
    """The setting with what has to be changed: the flag, the variable or the file. A rule about several has no name."""
    if name not in found:
        return name or "settings"
    origin = found[name].origin
    return f"--{name.replace('_', '-')}" if origin == FLAG else f"{name} ({origin})"
