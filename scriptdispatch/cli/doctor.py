"""`doctor`: each configured part, whether it works, and what to do if not."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.remedies import remedy, short
from scriptdispatch.cli.session import Session, command
from scriptdispatch.cli.signs import clean
from scriptdispatch.cli.times import short_span

if TYPE_CHECKING:
    from pathlib import Path

    from scriptdispatch.settings import Settings
    from scriptdispatch.wiring import Backends

LIMIT_S = 10.0


class Finding(NamedTuple):
    """`warning`: it works, and should be otherwise."""

    part: str
    ok: bool
    text: str
    advice: str = ""
    warning: str = ""


def register(app: typer.Typer) -> None:
    @command(app, "doctor")
    def doctor(
        session: Session,
        store_url: flags.StoreUrl = None,
        central_url: flags.CentralUrl = None,
        config: flags.ConfigFile = None,
        more: flags.More = None,
    ) -> None:
        """Check settings, store, queue, stream, central control, API, nodes, clock and access. Exit 1 if one fails."""
        findings = diagnose(session, flags.gather(more, store_url=store_url, central_url=central_url), config)
        healthy = all(finding.ok for finding in findings)
        if session.screen.json:
            session.screen.document({"ok": healthy, "checks": [finding._asdict() for finding in findings]})
        else:
            for finding in findings:
                _print(session, finding)
        if not healthy:
            raise typer.Exit(1)


def diagnose(session: Session, given: dict[str, Any], config: "Path | None") -> list[Finding]:
    from scriptdispatch import logs
    from scriptdispatch.errors import SettingsError
    from scriptdispatch.settings import load

    file = flags.settings_file(config, given)
    try:
        settings = load(given, file)
    except SettingsError as error:
        return [Finding("settings", False, str(error), "`scriptdispatch config` shows all and where each comes from")]
    logs.configure("error", settings.log_format)  # the findings say it; a library's warnings would stand between them
    findings = [_strategy(settings) or Finding("settings", True, f"from {file}" if file else "in order")]
    findings += asyncio.run(_backends(settings))
    findings += [asyncio.run(_central(settings)), _api(session, settings)]
    return findings


def _strategy(settings: "Settings") -> Finding | None:
    """None: it can be loaded."""
    from scriptdispatch.errors import SettingsError
    from scriptdispatch.services.create import key_maker

    try:
        key_maker(settings.queue_strategy)
    except SettingsError as error:
        return Finding("settings", False, str(error), "it is module:function, importable where web and serve are started")
    return None


def _print(session: Session, finding: Finding) -> None:
    sign = ("✕", "red") if not finding.ok else ("!", "yellow") if finding.warning else ("✓", "green")
    session.screen.parts(sign, (f" {finding.part:<9} {clean(finding.text)}", ""))
    if finding.warning:
        session.screen.line(f"  → {clean(finding.warning)}")
    if finding.advice and not finding.ok:
        session.screen.line(f"  → {finding.advice}")


async def _backends(settings: "Settings") -> list[Finding]:
    """Each part on its own: one server that is away must not hide what is wrong with the others."""
    from scriptdispatch.clock import SystemClock
    from scriptdispatch.wiring import make

    if settings.store_url.startswith("sqlite") and not settings.database.exists():
        advice = "start a node or the API here once (`scriptdispatch serve`), or set SCRIPTDISPATCH_STORE_URL"
        return [Finding("store", False, f"there is no database at {settings.database}", advice)]
    backends = make(settings, SystemClock())
    store = await _check("store", lambda: _store(settings, backends), settings.store_url, "STORE_URL")
    queue = await _check("queue", lambda: _queue(backends), settings.queue_url, "QUEUE_URL")
    if store.ok:
        store = store._replace(warning=" ".join(await backends.store.warnings()))
    stream = await _check("stream", lambda: _stream(backends), settings.mq_url, "MQ_URL")
    findings = [store, queue, stream]
    if queue.ok:
        findings += [await _nodes(settings, backends), await _clock(settings, backends)]
    if store.ok:
        findings.append(await _access(settings, backends))
    for finding, part in ((stream, backends.stream), (queue, backends.queue), (store, backends.store)):
        if finding.ok:
            await part.close()
    return findings


async def _check(part: str, look: Callable[[], Awaitable[str]], url: str | None, name: str) -> Finding:
    from scriptdispatch.errors import ScriptdispatchError

    try:
        return Finding(part, True, await asyncio.wait_for(look(), LIMIT_S))
    except (ScriptdispatchError, TimeoutError) as error:
        return Finding(part, False, _why(error), remedy(url, f"SCRIPTDISPATCH_{name}", _why(error)))


async def _store(settings: "Settings", backends: "Backends") -> str:
    from scriptdispatch.errors import StoreUnavailable
    from scriptdispatch.sqlite import Database, version

    await backends.store.open()
    line = await backends.store.ping()
    if not settings.store_url.startswith("sqlite"):
        return line
    database = Database(settings.database)
    await database.open([])
    try:
        verdict = await database.read(lambda db: [str(row[0]) for row in db.execute("PRAGMA quick_check")])
    finally:
        await database.close()
    if verdict != ["ok"]:
        raise StoreUnavailable(f"the database file is damaged: {'; '.join(verdict[:3])}")
    return f"SQLite {version()}, file sound, {settings.database}"


async def _queue(backends: "Backends") -> str:
    await backends.queue.open()
    return await backends.queue.ping()


async def _stream(backends: "Backends") -> str:
    await backends.stream.open()
    lag = await backends.stream.lag()
    line = await backends.stream.ping()
    return line if lag is None else f"{line}, {lag:,} messages wait"


async def _nodes(settings: "Settings", backends: "Backends") -> Finding:
    alive = [node for node, lives in await backends.leases.nodes() if lives]
    if not alive:
        return Finding(
            "node",
            False,
            "no node is alive: nothing is sent",
            "start one: `scriptdispatch serve`, or everything here: `scriptdispatch dev`",
        )
    problems = [problem for node in alive for problem in node.problems]
    if problems:
        return Finding("node", False, "; ".join(problems), "see the log of that node")
    workers = sum(worker.status == "ready" for node in alive for worker in node.workers)
    return Finding("node", workers > 0, f"{len(alive)} alive, {workers} workers ready", "see the log of the node")


async def _clock(settings: "Settings", backends: "Backends") -> Finding:
    now = backends.clock.now()
    advice = "set the clock (NTP): due times, deadlines and leases depend on it"
    if now.year < 2025:
        return Finding("clock", False, f"this machine says it is {now:%Y-%m-%d}", advice)
    beats = [node.last_heartbeat_at for node, lives in await backends.leases.nodes() if lives]
    ahead = max((beat - now for beat in beats), default=timedelta())
    if ahead > timedelta(seconds=settings.lease_ttl):
        return Finding("clock", False, f"a node's clock is {short_span(ahead.total_seconds())} ahead of ours", advice)
    return Finding("clock", True, f"{now:%Y-%m-%d %H:%M:%S} UTC")


async def _access(settings: "Settings", backends: "Backends") -> Finding:
    from scriptdispatch.errors import SettingsError
    from scriptdispatch.settings import check_bind

    stored = len(await backends.store.tokens())
    try:
        check_bind(settings, has_tokens=stored > 0)
    except SettingsError as error:
        return Finding(
            "access", False, str(error), "make a token: `scriptdispatch token create --local --name … --scope admin`"
        )
    count = stored + len(settings.api_tokens)
    text = f"{count} token{'s' if count != 1 else ''}" if count else "open, to this machine only"
    return Finding("access", True, f"{text}; host {settings.host}")


async def _central(settings: "Settings") -> Finding:
    from scriptdispatch.central.client import CentralControl
    from scriptdispatch.clock import SystemClock
    from scriptdispatch.errors import ScriptdispatchError

    advice = "start it, or set SCRIPTDISPATCH_CENTRAL_URL"
    if settings.central_url is None:
        return Finding("central", False, "central_url is not set", advice)
    central = CentralControl(settings, SystemClock(), limit=1)
    try:
        await asyncio.wait_for(central.probe(), LIMIT_S)
    except (ScriptdispatchError, TimeoutError) as error:
        return Finding("central", False, f"{settings.central_url}: {_why(error)}", advice)
    finally:
        await central.close()
    return Finding("central", True, settings.central_url)


def _api(session: Session, settings: "Settings") -> Finding:
    from scriptdispatch.client import Client, ClientError

    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = session.url or os.environ.get("SCRIPTDISPATCH_URL") or f"http://{host}:{settings.port}"
    advice = "start it: `scriptdispatch web`, or set SCRIPTDISPATCH_URL"
    try:
        with Client(url, session.token, timeout_s=LIMIT_S) as client:
            ready, lines = client.ready()
    except ClientError as error:
        return Finding("api", False, str(error), advice)
    if not ready:
        return Finding("api", False, f"{url} is not ready: {' '.join(lines.split())}", "mend what it names")
    return Finding("api", True, url)


def _why(error: BaseException) -> str:
    return short(str(error)) or "no answer in time"
