"""`lab`: a central control system for one machine, in the foreground."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.session import Session, command

Chance = Annotated[float, typer.Option(min=0, max=1)]
_SIMULATE = "Simulation"


def register(app: typer.Typer) -> None:
    @command(app, "lab", server=False)
    def lab(
        session: Session,
        devices: Annotated[int, typer.Option("--devices", min=1, max=100_000, help="dev-001, dev-002, …")] = 10,
        host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
        port: Annotated[int, typer.Option("--port", min=0, max=65_535)] = 8090,
        deliver_url: Annotated[
            str | None, typer.Option("--deliver-url", help="Where results go [SCRIPTDISPATCH_URL; http://127.0.0.1:8080].")
        ] = None,
        mq_url: Annotated[
            str | None, typer.Option("--mq-url", help="A Pulsar broker that results go to instead [SCRIPTDISPATCH_MQ_URL].")
        ] = None,
        folder: Annotated[Path, typer.Option("--folder", help="Where scripts run and the ledger is.")] = Path(
            ".scriptdispatch/lab"
        ),
        simulate: Annotated[
            bool, typer.Option("--simulate", help="Devices only pretend.", rich_help_panel=_SIMULATE)
        ] = False,
        duration: Annotated[
            str, typer.Option("--duration", help="Seconds, or a range as 0.2-1.5.", rich_help_panel=_SIMULATE)
        ] = "0.5",
        fail: Annotated[float, typer.Option("--fail", help="Chance of a failure.", rich_help_panel=_SIMULATE)] = 0.0,
        refuse: Annotated[float, typer.Option("--refuse", help="… that it is refused.", rich_help_panel=_SIMULATE)] = 0.0,
        silent: Annotated[float, typer.Option("--silent", help="… that nothing is heard.", rich_help_panel=_SIMULATE)] = 0.0,
        duplicate: Annotated[
            float, typer.Option("--duplicate", help="… that a message comes twice.", rich_help_panel=_SIMULATE)
        ] = 0.0,
        reorder: Annotated[
            float, typer.Option("--reorder", help="… that messages change places.", rich_help_panel=_SIMULATE)
        ] = 0.0,
        log_lines: Annotated[int, typer.Option("--log-lines", help="Lines per execution.", rich_help_panel=_SIMULATE)] = 5,
        busy_check: Annotated[
            bool | None,
            typer.Option("--busy-check/--no-busy-check", help="Refuse a second script on a busy device."),
        ] = None,
        seed: Annotated[int | None, typer.Option("--seed", rich_help_panel=_SIMULATE)] = None,
        log_level: flags.LogLevel = None,
        log_format: flags.LogFormat = None,
        config: flags.ConfigFile = None,
        lifeline: flags.Lifeline = None,
        ready_fd: flags.ReadyFd = None,
    ) -> None:
        """Run a lab: devices that really run the scripts they get, or with --simulate pretend to."""
        switches = {
            "devices": devices, "host": host, "port": port, "folder": folder, "simulate": simulate, "duration": duration,
            "fail": fail, "refuse": refuse, "silent": silent, "duplicate": duplicate, "reorder": reorder,
            "log_lines": log_lines, "busy_check": busy_check, "seed": seed, "mq_url": mq_url,
        }  # fmt: skip
        _run(session, switches, deliver_url, flags.gather(None, log_level=log_level, log_format=log_format), config,
             lifeline, ready_fd)  # fmt: skip


def _run(
    session: Session,
    switches: dict[str, Any],
    deliver_url: str | None,
    given: dict[str, Any],
    config: Path | None,
    lifeline: int | None,
    ready_fd: int | None,
) -> None:
    from scriptdispatch import logs
    from scriptdispatch.central.lab import LabConfig, run_lab
    from scriptdispatch.cli.lifeline import announce, end_with
    from scriptdispatch.errors import SettingsError
    from scriptdispatch.settings import load

    settings = load(given, config)
    logs.configure(settings.log_level, settings.log_format, process="lab")
    if switches["mq_url"] is None and settings.mq_url is not None and settings.mq_url.startswith("pulsar"):
        switches["mq_url"] = settings.mq_url  # on the embedded default there is no broker, and the API takes them
    chosen = LabConfig(
        **switches,
        # The lab is a client of the API like any other: its token is the client's, never a flag that `ps` shows.
        deliver_url=deliver_url or os.environ.get("SCRIPTDISPATCH_URL") or "http://127.0.0.1:8080",
        deliver_token=os.environ.get("SCRIPTDISPATCH_TOKEN") or next(iter(settings.api_tokens), None),
        mq_topic=settings.mq_topic,
        mq_secret=settings.mq_secret,
    )
    end_with(lifeline)
    told = announce(ready_fd)

    def ready(address: str) -> None:
        session.screen.note(
            f"lab of {chosen.devices} devices on {address}, results go to {chosen.mq_url or chosen.deliver_url}"
        )
        if told is not None:
            told(address)

    try:
        run_lab(chosen, ready=ready)
    except SettingsError as error:  # the settings were fine: it is the port that somebody else has
        session.screen.note(f"✕ {error}", style="red")
        raise typer.Exit(1) from None
