"""`web`: the API, in the foreground. Any number of them may run on one store."""

from typing import Annotated

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.session import Session, command


def register(app: typer.Typer) -> None:
    @command(app, "web", server=False)
    def web(
        session: Session,
        host: Annotated[str | None, typer.Option("--host", help="Address to listen on [127.0.0.1].")] = None,
        port: Annotated[int | None, typer.Option("--port", help="Port to listen on [8080].")] = None,
        store_url: flags.StoreUrl = None,
        central_url: flags.CentralUrl = None,
        log_level: flags.LogLevel = None,
        log_format: flags.LogFormat = None,
        config: flags.ConfigFile = None,
        more: flags.More = None,
        lifeline: flags.Lifeline = None,
        ready_fd: flags.ReadyFd = None,
    ) -> None:
        """Run the web process: the API and its documentation under /docs."""
        from scriptdispatch.settings import load

        given = flags.gather(
            more,
            host=host,
            port=port,
            store_url=store_url,
            central_url=central_url,
            log_level=log_level,
            log_format=log_format,
        )
        settings = load(given, config)
        from scriptdispatch.cli.lifeline import announce
        from scriptdispatch.web.app import run_web

        code = run_web(settings, ready=announce(ready_fd), lifeline_fd=lifeline)
        raise typer.Exit(code if isinstance(code, int) else 0)
