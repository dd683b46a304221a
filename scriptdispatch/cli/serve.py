"""`serve`: one node, with its master, workers and consumers, in the foreground."""

from typing import Annotated

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.session import Session, command


def register(app: typer.Typer) -> None:
    @command(app, "serve", server=False)
    def serve(
        session: Session,
        workers: Annotated[int | None, typer.Option("--workers", help="Worker processes [CPU count].")] = None,
        worker_capacity: Annotated[int | None, typer.Option("--worker-capacity", help="Tasks in hand in each.")] = None,
        consumers: Annotated[int | None, typer.Option("--consumers", help="Consumer processes [1].")] = None,
        store_url: flags.StoreUrl = None,
        central_url: flags.CentralUrl = None,
        node_name: Annotated[
            str | None, typer.Option("--node-name", help="Name of this node; the host's unless given.")
        ] = None,
        log_level: flags.LogLevel = None,
        log_format: flags.LogFormat = None,
        config: flags.ConfigFile = None,
        more: flags.More = None,
        lifeline: flags.Lifeline = None,
        ready_fd: flags.ReadyFd = None,
    ) -> None:
        """Run one node: master, workers and consumers.

        TERM drains, a second TERM or INT hurries, HUP replaces the workers one by one, TTIN and TTOU add or take one.
        """
        from scriptdispatch.services.create import key_maker
        from scriptdispatch.settings import load

        given = flags.gather(
            more,
            workers=workers,
            worker_capacity=worker_capacity,
            consumers=consumers,
            store_url=store_url,
            central_url=central_url,
            node_name=node_name,
            log_level=log_level,
            log_format=log_format,
        )
        settings = load(given, config)
        key_maker(settings.queue_strategy)  # the web process uses it; what it cannot load is said here, too
        from scriptdispatch.cli.lifeline import announce
        from scriptdispatch.master.supervisor import run_node

        raise typer.Exit(run_node(settings, ready=announce(ready_fd), lifeline_fd=lifeline))
