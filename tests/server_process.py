"""One server process for tests: started on free loopback ports in a folder, then killed, stopped or started again at will.

What differs between redis-server, mongod and a Pulsar broker is a `Kind`; what is the same is `Server`. Servers run in a
session of their own (Ctrl-C does not reach them before the tests have ended) and die with their owner (`server_keeper`).
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from tests.server_keeper import guard

LOWEST_PORT = 15000
PORT_TRIES = 4  # somebody may take a port between our look and the server's bind


class Kind(Protocol):
    """How one server is started and asked."""

    @property
    def name(self) -> str: ...

    @property
    def ports(self) -> int:
        """How many it needs; clients speak to the first."""

    @property
    def patience_s(self) -> float:
        """Until it is ready, on a busy machine."""

    def command(self, data: Path, ports: tuple[int, ...]) -> list[str]:
        """The command line; may write a configuration into `data`, which exists. Called at every start."""

    def environment(self, data: Path) -> Mapping[str, str]:
        """Added to ours."""

    def ready(self, ports: tuple[int, ...]) -> bool:
        """Serves reads and writes. Quick; False or OSError as long as it does not. Asked when its first port listens."""

    def url(self, ports: tuple[int, ...]) -> str:
        """The address as the product's settings take it."""


class StartFailed(Exception):
    """The server is installed, and did not come up. Carries the end of its log."""


class Server:
    """Not thread-safe. `folder` is the server's own: it is removed at the end."""

    def __init__(self, kind: Kind, folder: Path, *, owner: int | None = None) -> None:
        self.kind, self.folder = kind, folder
        self.log = folder / "server.log"
        self.ports: tuple[int, ...] = ()
        self._owner = owner or os.getpid()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.kind.url(self.ports)

    @property
    def port(self) -> int:
        """The port that clients speak to."""
        return self.ports[0]

    @property
    def pid(self) -> int:
        """Of the running process, or of the last one."""
        if self._process is None:
            raise AssertionError(f"{self.kind.name} was never started")
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> "Server":
        """Ready when it returns. The first start chooses the ports; later ones keep them, so clients find it again."""
        if self.alive():
            raise AssertionError(f"{self.kind.name} runs already, as pid {self.pid}")
        chosen = not self.ports
        for left in reversed(range(PORT_TRIES if chosen else 1)):
            if chosen:
                self.ports = tuple(free_port() for _ in range(self.kind.ports))
            try:
                self._launch()
                return self
            except StartFailed as failed:
                if not left or "already in use" not in str(failed):
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def kill(self) -> None:
        """SIGKILL, and gone when this returns. No error if it is dead already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)

    def terminate(self, timeout_s: float = 60) -> None:
        """SIGTERM: an orderly shutdown, finished when this returns."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout_s)

    def pause(self) -> None:
        """SIGSTOP: the kernel still accepts connections and bytes, nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self, *, wipe: bool = False) -> "Server":
        """SIGKILL and start again on the same ports; `wipe` loses all data, as after a lost disk."""
        self.kill()
        if wipe:
            shutil.rmtree(self._data)
        return self.start()

    def close(self) -> None:
        """Kills it and removes its folder. May be called twice."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)  # a late writer of logs does not matter

    def __enter__(self) -> "Server":
        return self if self.alive() else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _signal(self, number: signal.Signals) -> None:
        if not self.alive():
            raise AssertionError(f"{self.kind.name} is not running")
        os.kill(self.pid, number)

    def _launch(self) -> None:
        self._data.mkdir(parents=True, exist_ok=True)
        command = self.kind.command(self._data, self.ports)
        seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                cwd=self._data,
                env={**os.environ, **self.kind.environment(self._data)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        guard(self._owner, self._process.pid, self.folder)
        self._wait_ready(seen)

    def _wait_ready(self, seen: int) -> None:
        deadline = time.monotonic() + self.kind.patience_s
        pause = 0.005
        while time.monotonic() < deadline:
            if not self.alive():
                raise StartFailed(f"{self.kind.name} ended while starting:\n{self._log_from(seen)}")
            if self._is_ready():
                return
            time.sleep(pause)  # no server tells when it listens: ask, quickly at first
            pause = min(pause * 1.3, 0.1)
        self.kill()
        raise StartFailed(f"{self.kind.name} was not ready within {self.kind.patience_s:g} s:\n{self._log_from(seen)}")

    def _is_ready(self) -> bool:
        try:
            return self._listens() and self.kind.ready(self.ports)
        except OSError:
            return False

    def _listens(self) -> bool:
        """Our process, on our port: somebody else's server there would answer just as well while ours is giving up."""
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return False  # it ended just now, which the caller sees next
        return any(sock.status == psutil.CONN_LISTEN and sock.laddr.port == self.port for sock in sockets)

    def _log_from(self, offset: int) -> str:
        return self.log.read_bytes()[offset:][-3000:].decode(errors="replace")


def free_port() -> int:
    """A port on loopback that nobody uses, below those that the kernel gives to outgoing connections.

    With one of the kernel's own range a server killed by a test may not come back: a client that keeps connecting to it
    can be given the same port as its source, is then connected to itself, and holds the port.
    """
    for _ in range(200):
        port = random.randrange(LOWEST_PORT, max(_first_outgoing_port(), LOWEST_PORT + 1))
        if _can_bind(port):
            return port
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49152  # the range of IANA, where /proc does not say


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
