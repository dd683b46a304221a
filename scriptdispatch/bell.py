"""Wakes processes of one machine without polling: a Unix datagram socket per listener, in a folder beside the database.

Ringing is best effort and never blocks: a ring that is lost costs one safety-net check. A datagram may carry a payload
(events). A socket whose process is gone is removed by whoever rings it next.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from scriptdispatch.ids import new_id

MAX_PAYLOAD = 60_000
NEVER = -1
SETTLED_NS = 2_000_000_000  # some file systems stamp folders with whole seconds


class Bell:
    """`topic` separates those who wait for different things: queue, stream, events."""

    def __init__(self, database: Path) -> None:
        self._folder = database.with_name(database.name + "-bells")
        self._handle: int | None = None
        self._out: socket.socket | None = None
        self._names: list[str] = []
        self._listed_ns = NEVER  # the time of the folder's last change when it was listed

    def ring(self, topic: str, payload: bytes = b"") -> bool:
        """Every listener of the topic, in whatever process, wakes up. Also one in this process. False: one of them has
        so much to hear already that this payload was lost to it."""
        heard = [self._send(name, payload) for name in self._listeners() if name.startswith(topic + ".")]
        return all(heard)  # everybody was rung, also after one that did not hear

    def has_listeners(self, topic: str) -> bool:
        return any(name.startswith(topic + ".") for name in self._listeners())

    def listen(self, topic: str, heard: Callable[[bytes], None]) -> Callable[[], None]:
        """Calls `heard` on the running loop for each ring. Answers the function that ends it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{topic}.{os.getpid()}.{new_id()[-6:]}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind(self._address(name))
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, _drain, sock, heard)

        def stop() -> None:
            loop.remove_reader(sock)
            sock.close()
            (self._folder / name).unlink(missing_ok=True)

        return stop

    def _listeners(self) -> list[str]:
        """The sockets in the folder, listed again only when it has changed: a task rings and asks several times."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
            if changed_ns != self._listed_ns:
                self._names = os.listdir(self._folder)
                # Two changes soon after each other leave the same time: a list made that soon is not kept.
                self._listed_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else NEVER
        except FileNotFoundError:
            return []
        except OSError:
            return self._names  # no handle left to look with: those that were there last
        return self._names

    def _send(self, name: str, payload: bytes) -> bool:
        try:
            if self._out is None:
                self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._out.setblocking(False)
            self._out.sendto(payload, self._address(name))
        except ConnectionRefusedError:
            (self._folder / name).unlink(missing_ok=True)  # its process is gone
        except FileNotFoundError:
            return True  # ended just now
        except OSError:
            return False  # its buffer is full: it has rings to hear already; or we have no handle left to ring with
        return True

    def _address(self, name: str) -> str:
        """A socket's path may have some 100 bytes: for a longer one go through the folder's handle."""
        path = str(self._folder / name)
        if len(path.encode()) < 100:
            return path
        if self._handle is None:
            self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._handle}/{name}"

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None


def _drain(sock: socket.socket, heard: Callable[[bytes], None]) -> None:
    for _ in range(100):
        try:
            payload = sock.recv(MAX_PAYLOAD + 4096)
        except (BlockingIOError, OSError):
            return
        heard(payload)
