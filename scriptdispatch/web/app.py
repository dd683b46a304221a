"""The web process: the API over store, queue, locks and stream. It holds no state; any number of them may run."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from scriptdispatch import __version__, logs, processes
from scriptdispatch.central.client import CentralControl
from scriptdispatch.errors import ScriptdispatchError
from scriptdispatch.services.actions import Actions
from scriptdispatch.services.create import Creator
from scriptdispatch.services.idempotency import Idempotency
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.services.scripts import Scripts
from scriptdispatch.services.stats import StatsDesk
from scriptdispatch.services.tokens import TokenBook
from scriptdispatch.settings import Settings, check_bind
from scriptdispatch.web import docs, health, problems
from scriptdispatch.web.api import cluster, devices, messages, tasks, tokens
from scriptdispatch.web.api import logs as log_routes
from scriptdispatch.web.auth import Gate
from scriptdispatch.web.frame import Frame
from scriptdispatch.web.hub import Hub
from scriptdispatch.web.limits import Buckets
from scriptdispatch.web.parts import Parts
from scriptdispatch.web.routes import API, check, register
from scriptdispatch.wiring import Backends, connect

DRAIN_S = 3  # open answers get so long when the process is asked to end
CENTRAL_AT_ONCE = 64
log = logs.get("web")


def create_app(settings: Settings, backends: Backends, central: CentralControl) -> FastAPI:
    app = FastAPI(
        title="scriptdispatch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.parts = make_parts(settings, backends, central)
    for module in (tasks, log_routes, devices, cluster, messages, tokens):  # looked through in this order
        register(app, module.ROUTES, API)
    register(app, [*health.ROUTES, *docs.ROUTES])
    problems.install(app)
    docs.add_schemas(app)
    app.add_middleware(Frame, max_body_bytes=settings.max_body_bytes)
    check(app)
    return app


def make_parts(settings: Settings, backends: Backends, central: CentralControl) -> Parts:
    scripts = Scripts(backends.store)
    book = TokenBook(backends.store, backends.clock, settings.api_tokens)
    return Parts(
        settings=settings,
        backends=backends,
        central=central,
        scripts=scripts,
        creator=Creator(settings, backends, central, scripts),
        idempotency=Idempotency(backends.store, backends.clock),
        actions=Actions(backends, settings, central.cancel),
        reconciler=Reconciler(backends, settings),
        stats=StatsDesk(backends),
        tokens=book,
        gate=Gate(book, Buckets(settings.rate_limit_per_second, backends.clock.uptime)),
        hub=Hub(backends.events),
    )


def run_web(settings: Settings, *, ready: Callable[[str], None] | None = None, lifeline_fd: int | None = None) -> int:
    """The whole life of the process: its exit code. `ready` is told the address once it answers. When the other end of
    `lifeline_fd` closes, whoever started us is gone, and we end as on TERM. Our errors are for the caller to say."""
    logs.configure(settings.log_level, settings.log_format, role="web")
    import uvloop

    processes.begin("web")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, ready, lifeline_fd))


async def _serve(settings: Settings, ready: Callable[[str], None] | None, lifeline_fd: int | None) -> int:
    sock = bind(settings)
    backends = await connect(settings)
    central = CentralControl(settings, backends.clock, limit=CENTRAL_AT_ONCE)
    try:
        app = create_app(settings, backends, central)
        check_bind(settings, has_tokens=not await app.state.parts.tokens.is_open())
        server = Server(app)
        with _ends_by(server, lifeline_fd):
            if ready is not None:
                ready(address(sock))
            log.info("listening", event_name="web.ready", url=address(sock), pid=os.getpid())
            await server.serve(sockets=[sock])
            log.info("stopped", event_name="web.stopped")
        return 0
    finally:
        sock.close()
        await central.close()
        await backends.close()


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: it would end the process by the signal again after a clean end."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,  # a header must not choose whose rate limit counts
                timeout_graceful_shutdown=DRAIN_S,
                backlog=2048,
            )
        )
        self._hub: Hub = app.state.parts.hub

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """First call: open answers are finished. Second: at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._hub.close()


@contextlib.contextmanager
def _ends_by(server: Server, lifeline_fd: int | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.end)
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, _lifeline, loop, server, lifeline_fd)
    try:
        yield
    finally:
        if lifeline_fd is not None:
            loop.remove_reader(lifeline_fd)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def _lifeline(loop: asyncio.AbstractEventLoop, server: Server, fd: int) -> None:
    if not os.read(fd, 1024):  # end of file: nobody holds the other end any more
        loop.remove_reader(fd)
        server.end()


def bind(settings: Settings) -> socket.socket:
    """The listening socket, before anything else is opened: a busy port is said at once, in one line."""
    host = "127.0.0.1" if settings.host == "localhost" else settings.host
    try:
        family, kind, proto, _, name = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ScriptdispatchError(f"cannot listen on {host}: {error.strerror or error}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(name)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ScriptdispatchError(
            f"port {settings.port} on {host} cannot be used ({error.strerror}): "
            f"stop what listens there, or choose another one with --port {settings.port + 1}"
        ) from error
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
