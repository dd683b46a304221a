"""One child process of the master, seen from the master: spawn, pipe, heartbeats, the end.

A child is dead when its pipe closes, its process ends, it is silent for too long, or it does not read what it is sent.
Whichever comes first, it is killed and reaped before anybody acts on its death, so it is no zombie.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from datetime import datetime
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from scriptdispatch import ids, logs, wire
from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import WorkerRecord
from scriptdispatch.errors import WireError
from scriptdispatch.settings import Settings

SILENT_BEATS = 5
REAP_S = 5.0
START_S = 30.0  # a child that has not said Ready by then is not coming
Kind = Literal["worker", "consumer"]
log = logs.get("master")


class Child:
    """`on_message` and `on_death` are called on the master's loop; `on_death` exactly once."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        node_id: str,
        settings: Settings,
        clock: Clock,
        on_message: Callable[["Child", Any], None],
        on_death: Callable[["Child"], None],
        restarts: int = 0,
    ) -> None:
        self.kind, self.name, self.node_id, self.restarts = kind, name, node_id, restarts
        self.id = ids.new_id()
        self.ready = False
        self.named = False  # in a heartbeat of the node: its rows are found if the node dies
        self.stopping = False
        self.exit_code: int | None = None
        self.pid = 0  # the last known, also after its end
        self.last_beat = wire.Beat()
        self.started_at: datetime = clock.now()
        self.last_heartbeat_at: datetime = self.started_at
        self._settings, self._clock = settings, clock
        self._on_message, self._on_death = on_message, on_death
        self._heard = clock.uptime()
        self._born = self._heard
        self._process: BaseProcess | None = None
        self._pipe: wire.Pipe[Any, Any] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        return self._clock.uptime() - self._born

    async def spawn(self) -> None:
        """Raises OSError if the machine has no room for it."""
        ours, theirs = socket.socketpair()
        target = _entry(self.kind)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=target, args=(theirs, self._settings, self.id, self.node_id), name=f"{self.kind}-{self.name}"
        )
        try:
            await asyncio.to_thread(self._process.start)
            self.pid = self._process.pid or 0
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # else the end of the child would not close the pipe
        self._pipe = await wire.open_pipe(ours, wire.FromChild)
        self._reading = asyncio.create_task(self._read())

    def send(self, message: wire.ToChild) -> None:
        """Never blocks. A child that does not read is declared dead by `check`."""
        if self._pipe is not None:
            self._pipe.send(message)

    def stop(self, grace_s: float) -> None:
        self.stopping = True
        self.send(wire.Stop(grace_s=grace_s))

    def check(self) -> None:
        """A step of the master's loop: is it alive?"""
        silent_s = self._clock.uptime() - self._heard
        limit_s = SILENT_BEATS * self._settings.heartbeat_interval if self.ready else START_S
        if silent_s > limit_s:
            self.kill(f"silent for {silent_s:.1f} s")
        elif self._pipe is not None and self._pipe.unsent > wire.MAX_BUFFER:
            self.kill("does not read its pipe")

    def kill(self, why: str) -> None:
        log.warning("child killed", event_name="child.killed", child=self.kind, id=self.id, pid=self.pid, reason=why)
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.pid is not None and self._process.exitcode is None:
            try:
                os.kill(self._process.pid, number)
            except ProcessLookupError:
                return  # it is gone already; the reader notices

    def record(self, status: Literal["starting", "ready", "stopping", "offline"] | None = None) -> WorkerRecord:
        now = "stopping" if self.stopping else "ready" if self.ready else "starting"
        types = list(self._settings.task_types) if self._settings.task_types is not None else None
        return WorkerRecord(
            id=self.id,
            name=self.name,
            node_id=self.node_id,
            pid=self.pid,
            status=status or now,  # type: ignore[arg-type]
            capacity=self._settings.worker_capacity,
            load=self.last_beat.load,
            task_types=types,
            last_heartbeat_at=self.last_heartbeat_at,
            started_at=self.started_at,
            restarts=self.restarts,
        )

    async def _read(self) -> None:
        assert self._pipe is not None
        try:
            while True:
                message = await self._pipe.receive()
                self._heard = self._clock.uptime()
                if isinstance(message, wire.Beat):
                    self.last_beat = message
                    self.last_heartbeat_at = self._clock.now()
                elif isinstance(message, wire.Ready):
                    self.ready = True
                self._on_message(self, message)
        except EOFError:
            await self._bury()
        except WireError as error:
            self.kill(str(error))
            await self._bury()
        except Exception:  # a bug of ours in what its message set off: without a reader it would never be buried
            log.exception("a bug", event_name="child.bug", child=self.kind, id=self.id)
            self.kill("its message could not be handled")
            await self._bury()

    async def _bury(self) -> None:
        """Its pipe is closed. Make sure that the process is gone, too, before anybody takes over its work."""
        assert self._process is not None
        assert self._pipe is not None
        self._pipe.close()
        await asyncio.to_thread(self._process.join, 1.0 if not self.stopping else REAP_S)
        if self._process.exitcode is None:
            self.signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.join, REAP_S)
        self.exit_code = self._process.exitcode
        self.ready = False
        self._process.close()
        self._process = None
        self._on_death(self)


def _entry(kind: Kind) -> Callable[..., None]:
    if kind == "worker":
        from scriptdispatch.worker.process import main as worker_main

        return worker_main
    from scriptdispatch.mq.process import main as consumer_main

    return consumer_main
