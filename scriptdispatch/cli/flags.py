"""Settings as flags, for the commands that run a part of the service or look at its settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from scriptdispatch.cli.session import wrong

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file; ./scriptdispatch.toml if it is there.", dir_okay=False)
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store-url", help="sqlite:///path (sqlite:////absolute), or mongodb://host/name with queue_url and mq_url."
    ),
]
CentralUrl = Annotated[str | None, typer.Option("--central-url", help="Central control, e.g. http://host:8090.")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="auto, console or json.")]
More = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable. See `config`.")
]
Lifeline = Annotated[int | None, typer.Option("--lifeline", hidden=True)]
ReadyFd = Annotated[int | None, typer.Option("--ready-fd", hidden=True)]


DEV_FOLDER = Path(".scriptdispatch")
DEV_SETTINGS = DEV_FOLDER / "settings.toml"


def found_config() -> Path | None:
    """Where nothing else is configured: the settings that `dev` wrote down here, so that other commands meet its parts."""
    from scriptdispatch.settings import FILE, PREFIX

    configured = Path(FILE).exists() or f"{PREFIX}STORE_URL" in os.environ
    return DEV_SETTINGS if DEV_SETTINGS.exists() and not configured else None


def settings_file(config: Path | None, given: Mapping[str, Any]) -> Path | None:
    """The file for `load`: the one that was named; else what `dev` wrote down here, unless another store was named."""
    return config or (None if given.get("store_url") else found_config())


def gather(more: list[str] | None, **given: Any) -> dict[str, Any]:
    """The flags that were given, by the name of their setting."""
    flags = {name: value for name, value in given.items() if value is not None}
    for pair in more or ():
        name, sign, value = pair.partition("=")
        if not sign:
            raise wrong("--set", f"{pair!r} is not NAME=VALUE, e.g. --set check_interval=2")
        flags[_known(name.strip())] = value
    return flags


def _known(name: str) -> str:
    from scriptdispatch.settings import Settings, _hint

    key = name.lower().replace("-", "_")
    if key not in Settings.model_fields:
        raise wrong("--set", f"unknown setting {name!r}{_hint(key)}")
    return key
