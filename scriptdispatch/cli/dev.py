"""`dev`: lab, node and web on this machine, in one terminal. Data and logs are kept in one folder.

This process only starts, watches and stops them. They never outlive it: each holds the read end of a pipe whose write end
is ours alone, so also after a SIGKILL they see it close and stop.
"""

import asyncio
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.session import Session, command

if TYPE_CHECKING:
    from scriptdispatch.cli.dev_part import Part
    from scriptdispatch.settings import Settings

LAB_HOST: Final = "127.0.0.1"
TRIES_TO_START: Final = 2
HELLO: Final = """\
#!/bin/sh
# An example: real output, line by line, with progress.
echo "hello from $SD_DEVICE_ID"
for step in 1 2 3; do
  echo "::progress $((step * 33)) step $step of 3"
  echo "step $step"
  sleep 0.5
done
echo "done"
"""


class Plan(NamedTuple):
    """What `dev` was asked for."""

    port: int | None
    lab_port: int
    devices: int
    simulate: bool
    workers: int | None
    data: Path


def register(app: typer.Typer) -> None:
    @command(app, "dev", server=False)
    def dev(
        session: Session,
        port: Annotated[int | None, typer.Option("--port", min=1, max=65_535, help="Of the API [8080].")] = None,
        lab_port: Annotated[int, typer.Option("--lab-port", min=1, max=65_535, help="Of the lab.")] = 8090,
        devices: Annotated[int, typer.Option("--devices", min=1, max=100_000, help="Of the lab.")] = 10,
        simulate: Annotated[bool, typer.Option("--simulate", help="Devices only pretend to run scripts.")] = False,
        workers: Annotated[int | None, typer.Option("--workers", help="Worker processes [CPU count].")] = None,
        data: Annotated[Path, typer.Option("--data", help="Folder for database, logs and lab.")] = flags.DEV_FOLDER,
    ) -> None:
        """Run everything on this machine: a lab, a node and the API. Ctrl-C stops it; data stays."""
        raise typer.Exit(run(session, Plan(port, lab_port, devices, simulate, workers, data)))


def run(session: Session, plan: Plan) -> int:
    from scriptdispatch.settings import load

    try:
        plan.data.mkdir(parents=True, exist_ok=True, mode=0o700)  # params may be secrets
        lock = _lock(plan.data)
    except OSError as error:
        session.screen.note(f"✕ cannot write to {plan.data}: {error.strerror}; use another folder: --data", style="red")
        return 1
    folder = plan.data.absolute()
    chosen = {
        "store_url": f"sqlite:///{folder / 'scriptdispatch.db'}",
        "central_url": f"http://{LAB_HOST}:{plan.lab_port}",
        "port": plan.port,
        "workers": plan.workers,
    }
    settings = load(chosen)
    if lock is None:
        session.screen.note(
            f"✕ another `scriptdispatch dev` runs on {plan.data}; stop it, or use another folder: --data", style="red"
        )
        return 1
    with lock:
        busy = busy_port(settings.host, settings.port, "--port") or busy_port(LAB_HOST, plan.lab_port, "--lab-port")
        if busy is not None:
            session.screen.note(f"✕ {busy}", style="red")
            return 1
        _write_files(folder, settings)
        return asyncio.run(House(session, plan, settings, folder).live())


class House:
    """The three parts, from the first start to the last stop."""

    def __init__(self, session: Session, plan: Plan, settings: "Settings", folder: Path) -> None:
        self._screen, self._plan, self._settings, self._folder = session.screen, plan, settings, folder
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lifeline, self._our_end = os.pipe()
        self._parts: list[Part] = []

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)
        self._parts = await self._make_parts()
        duties = [asyncio.ensure_future(part.listen()) for part in self._parts]
        try:
            if not await self._start():
                return 0 if self._stop.is_set() else 1
            self._greet()
            duties += [asyncio.ensure_future(part.keep()) for part in self._parts]
            await self._stop.wait()
            self._screen.note("stopping (Ctrl-C again to hurry)")
            return 0
        finally:
            # First nobody starts parts again, then they are stopped.
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)
            await self._shut_down()

    async def _make_parts(self) -> "list[Part]":
        from scriptdispatch.cli.dev_part import Part

        tokens = await _tokens(self._settings)
        plain = _environment()
        closed = {**plain, "SCRIPTDISPATCH_API_TOKENS": ",".join(tokens)} if tokens else plain
        lab = {**plain, "SCRIPTDISPATCH_TOKEN": tokens[-1]} if tokens else plain
        shared = ["--store-url", self._settings.store_url, "--central-url", str(self._settings.central_url)]
        shared += ["--log-format", "json"]
        web = ["web", *shared, "--port", str(self._settings.port)]
        node = ["serve", *shared, "--workers", str(self._settings.workers)]
        return [
            Part("web", web, closed, self._folder, self._lifeline, self._say),
            Part("node", node, plain, self._folder, self._lifeline, self._say),
            Part("lab", self._lab_args(), lab, self._folder, self._lifeline, self._say),
        ]

    def _lab_args(self) -> list[str]:
        plan = self._plan
        args = ["lab", "--port", str(plan.lab_port), "--devices", str(plan.devices), "--folder", str(self._folder / "lab")]
        args += ["--deliver-url", self._url(), "--log-format", "json"]
        return [*args, "--simulate"] if plan.simulate else args

    async def _start(self) -> bool:
        """All at once: they wait for each other where they must. False: one does not come up, or we were told to stop."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        everything: asyncio.Future[list[bool]] = asyncio.gather(*(self._bring_up(part) for part in self._parts))
        await asyncio.wait((everything, stop), return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            everything.cancel()
            return False
        stop.cancel()
        return all(everything.result()) and await self._answers()

    async def _bring_up(self, part: "Part") -> bool:
        for left in reversed(range(TRIES_TO_START)):
            if await part.start():
                return True
            part.tell_news()
            if left:
                self._say(part.name, "did not come up; tries once more")
                await part.stop(1.0, self._hurry)
                part.revive()
        self._screen.note(f"✕ {part.name} does not start; its last words ({part.log}):", style="red")
        for line in part.last_words():
            self._screen.note(f"    {line}")
        return False

    async def _answers(self) -> bool:
        """The API says itself that it is ready."""
        for _ in range(50):
            if await asyncio.to_thread(_get, self._settings.host, self._settings.port, "/readyz"):
                return True
            await asyncio.sleep(0.1)
        self._screen.note(f"✕ the API does not get ready: see {self._url()}/readyz and {self._folder}", style="red")
        return False

    def _greet(self) -> None:
        plan, url = self._plan, self._url()
        kind = "simulated devices" if plan.simulate else "devices"
        workers = self._settings.workers
        self._screen.done(f"web   {url}   api {url}/api/v1   docs {url}/docs")
        self._screen.done(f"node  {workers} worker{'s' if workers != 1 else ''}, {self._settings.consumers} consumer")
        last = f" … dev-{plan.devices:03d}" if plan.devices > 1 else ""
        self._screen.done(f"lab   http://{LAB_HOST}:{plan.lab_port}   {plan.devices} {kind}: dev-001{last}")
        self._screen.line(f"  data  {plan.data} (database, logs)")
        self._screen.line(f"  try   {self._example()}")
        self._screen.line("  stop  Ctrl-C")

    def _example(self) -> str:
        program = _program()
        where = "" if self._url() == "http://127.0.0.1:8080" else f"SCRIPTDISPATCH_URL={self._url()} "
        file = shlex.quote(str(self._plan.data / "hello.sh"))
        return f"{where}{program} task create --device dev-001 --language shell --file {file} --follow"

    def _url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(self._settings.host, self._settings.host)
        return f"http://{host}:{self._settings.port}"

    def _asked_to_stop(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _shut_down(self) -> None:
        """In order: nothing new comes in, then what is under way ends, then the devices."""
        for part, grace_s in zip(self._parts, (6.0, self._settings.shutdown_grace + 6.0, 6.0), strict=True):
            await part.stop(grace_s, self._hurry)
        os.close(self._our_end)
        self._screen.note("stopped")

    def _say(self, part: str, text: str) -> None:
        self._screen.note(f"{part:<5} {text}", style="yellow")


def _program() -> str:
    """How to call us from the same folder in another terminal."""
    if shutil.which("scriptdispatch"):
        return "scriptdispatch"
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m scriptdispatch"
    return shlex.quote(os.path.relpath(sys.argv[0]))


def busy_port(host: str, port: int, option: str) -> str | None:
    """What to do about a port that somebody else has; None if it is free."""
    if not _taken(host, port):
        return None
    other = next((one for one in range(port + 1, min(port + 50, 65_536)) if not _taken(host, one)), None)
    way = f"or choose another: scriptdispatch dev {option} {other}" if other else f"or choose another with {option}"
    return f"port {port} on {host} is in use; stop what uses it, {way}"


def _taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return True
    return False


def _lock(folder: Path) -> IO[str] | None:
    """Holds the folder for this `dev`; the lock goes with the process."""
    file = (folder / "dev.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _write_files(folder: Path, settings: "Settings") -> None:
    """The example, and the settings by which `doctor` and `token --local` find this database."""
    hello = folder / "hello.sh"
    if not hello.exists():
        hello.write_text(HELLO)
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in ("store_url", "central_url", "port")}
    lines = [f"{name} = {_toml(value)}\n" for name, value in chosen.items()]
    (folder / "settings.toml").write_text("# Written by `scriptdispatch dev` at each start.\n" + "".join(lines))


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


async def _tokens(settings: "Settings") -> list[str]:
    """Empty while the API is open. Else those of the settings and a fresh one, with which the lab delivers."""
    closed = bool(settings.api_tokens)
    if not closed and settings.database.exists():
        from scriptdispatch.wiring import connect

        backends = await connect(settings)
        try:
            closed = bool(await backends.store.tokens())
        finally:
            await backends.close()
    return [*settings.api_tokens, f"sd_lab{secrets.token_hex(4)}_{secrets.token_urlsafe(24)}"] if closed else []


def _environment() -> dict[str, str]:
    """Ours, without the client's own: where this person's commands go is not where the parts belong."""
    return {name: value for name, value in os.environ.items() if name not in ("SCRIPTDISPATCH_URL", "SCRIPTDISPATCH_TOKEN")}


def _get(host: str, port: int, path: str) -> bool:
    import http.client

    connection = http.client.HTTPConnection(host if host not in ("0.0.0.0", "::") else "127.0.0.1", port, timeout=3)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
