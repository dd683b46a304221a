"""What worker and consumer processes have in common: pipe, signals, heartbeats, the way they end.

Runs in the child. It ends on `Stop` (exit 0), on SIGTERM (the same, by hand), and when the pipe closes: then its master is
dead, it takes nothing new, ends what it has in hand within ORPHAN_GRACE_S and goes.
"""

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Any, Protocol

from scriptdispatch import crashpoints, logs, processes, wire
from scriptdispatch.clock import LoopClock
from scriptdispatch.errors import WireError
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends, connect

ORPHAN_GRACE_S = 15.0


class Role(Protocol):
    """The work of a child."""

    async def start(self) -> None: ...

    async def handle(self, message: Any) -> None:
        """A message other than Stop."""
        ...

    def beat(self) -> wire.Beat: ...

    async def stop(self, grace_s: float, hurry: bool) -> None:
        """Take nothing new, end what is in hand within the grace. `hurry`: undo what can be undone instead."""
        ...


class Context:
    """What a role gets to work with."""

    def __init__(self, settings: Settings, backends: Backends, pipe: "wire.Pipe[Any, Any]", id: str, node_id: str) -> None:
        self.settings, self.backends, self.pipe, self.id, self.node_id = settings, backends, pipe, id, node_id


def run(sock: socket.socket, settings: Settings, kind: str, id: str, node_id: str, make: Callable[[Context], Role]) -> None:
    """Runs in another process: from its first line to its exit."""
    import uvloop

    processes.begin(f"{kind} {id[-8:]}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the master decides when we go
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logs.configure(settings.log_level, settings.log_format, process=kind, id=id[-8:])
    crashpoints.reach_now("child.start", kind)
    uvloop.run(_main(sock, settings, kind, id, node_id, make))


async def _main(
    sock: socket.socket, settings: Settings, kind: str, id: str, node_id: str, make: Callable[[Context], Role]
) -> None:
    import os

    pipe = await wire.open_pipe(sock, wire.ToChild)
    told: _Told = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _once(told, settings.shutdown_grace))
    backends = await connect(settings, clock=LoopClock())
    role = make(Context(settings, backends, pipe, id, node_id))
    crashpoints.role = kind
    await role.start()
    pipe.send(wire.Ready(pid=os.getpid()))
    duties = [
        asyncio.create_task(_listen(pipe, role, told)),
        asyncio.create_task(_beat(pipe, role, settings.heartbeat_interval)),
    ]
    grace_s, hurry = await told
    await role.stop(grace_s, hurry)
    for duty in duties:
        duty.cancel()
    await backends.close()
    await _flush(pipe)


_Told = asyncio.Future[tuple[float, bool]]


def _once(told: _Told, grace_s: float, hurry: bool = False) -> Callable[[], None]:
    def tell() -> None:
        if not told.done():
            told.set_result((grace_s, hurry))

    return tell


async def _listen(pipe: "wire.Pipe[Any, Any]", role: Role, told: _Told) -> None:
    log = logs.get("child")
    while True:
        try:
            message = await pipe.receive()
        except (EOFError, WireError) as error:
            log.warning("the master is gone; ending", reason=str(error))
            _once(told, ORPHAN_GRACE_S, hurry=True)()
            return
        if isinstance(message, wire.Stop):
            if told.done():
                await role.stop(message.grace_s, True)
            _once(told, message.grace_s)()
        else:
            await role.handle(message)


async def _beat(pipe: "wire.Pipe[Any, Any]", role: Role, interval_s: float) -> None:
    while True:
        pipe.send(role.beat())
        await asyncio.sleep(interval_s)


async def _flush(pipe: "wire.Pipe[Any, Any]") -> None:
    try:
        await asyncio.wait_for(pipe.drain(), 1)
    except (EOFError, TimeoutError):
        return  # nobody reads any more
    finally:
        pipe.close()
