"""A process that ends test servers whose owner died without ending them (a pytest run that was SIGKILLed, say).

One keeper per process that starts servers. It reads lines `owner's pid <tab> server's pid <tab> folder` on its standard
input and holds both by pidfd, so that a pid used again is never hit. Linux only: elsewhere a killed run leaves its servers
behind. It knows nothing of pytest and imports nothing but the standard library, so it is up within a few milliseconds.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_lock = threading.Lock()
_keepers: dict[int, subprocess.Popen[bytes]] = {}  # by our own pid: a forked child needs one of its own


def guard(owner: int, server: int, folder: Path) -> None:
    """When `owner` ends, however it ends, `server` is killed and `folder` removed."""
    if not hasattr(os, "pidfd_open"):
        return
    with _lock:
        pipe = (_keepers.get(os.getpid()) or _start()).stdin
        if pipe is None:
            raise RuntimeError("the keeper has no standard input")
        pipe.write(f"{owner}\t{server}\t{folder}\n".encode())
        pipe.flush()


def _start() -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal goes to the whole process group, and the keeper must outlive it.
    keeper = subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True)
    _keepers[os.getpid()] = keeper
    return keeper


@dataclass
class Ward:
    owner: int  # pidfds
    server: int
    folder: str


class Keeper:
    """Runs in the keeper process."""

    def __init__(self) -> None:
        self._wards: list[Ward] = []
        self._rest = b""
        self._listening = True

    def run(self) -> None:
        """Until nobody can send wards any more and none is left. The waits have no end of their own: processes end them."""
        while self._listening or self._wards:
            ready = self._wait()
            if 0 in ready:
                self._read()
            for ward in [ward for ward in self._wards if {ward.owner, ward.server} & ready]:
                self._close(ward, owner_gone=ward.owner in ready)

    def _wait(self) -> set[int]:
        poll = select.poll()
        if self._listening:
            poll.register(0, select.POLLIN)
        for ward in self._wards:
            poll.register(ward.owner, select.POLLIN)
            poll.register(ward.server, select.POLLIN)
        return {fd for fd, _ in poll.poll()}

    def _read(self) -> None:
        data = os.read(0, 65536)
        self._listening = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            owner, server, folder = line.decode().split("\t")
            self._take(int(owner), int(server), folder)

    def _take(self, owner: int, server: int, folder: str) -> None:
        try:
            server_fd = os.pidfd_open(server)
        except ProcessLookupError:
            return  # it was ended before we heard of it
        try:
            self._wards.append(Ward(os.pidfd_open(owner), server_fd, folder))
        except ProcessLookupError:
            _end(server_fd, folder)

    def _close(self, ward: Ward, *, owner_gone: bool) -> None:
        self._wards.remove(ward)
        os.close(ward.owner)
        if owner_gone:
            _end(ward.server, ward.folder)
        else:
            os.close(ward.server)  # ended by its owner, who also removes the folder


def _end(server: int, folder: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(server, signal.SIGKILL)
    dead = select.poll()
    dead.register(server, select.POLLIN)
    dead.poll(10_000)
    os.close(server)
    shutil.rmtree(folder, ignore_errors=True)  # may be gone already: the owner was on its way out


if __name__ == "__main__":
    Keeper().run()
