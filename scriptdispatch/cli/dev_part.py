"""One part of `dev`: a child process with its log file, watched, and started again when it dies."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from scriptdispatch.cli.signs import clean

READY_S: Final = 30.0  # how long a part may take to come up
SHORT_LIFE_S: Final = 30.0  # after a longer life the back-off begins anew
MAX_BACK_OFF_S: Final = 10.0
LOG_LIMIT: Final = 10 * 1024 * 1024
LOOK_S: Final = 0.5
LOUD: Final = ("warning", "error", "critical", "exception")
Say = Callable[[str, str], None]


class Part:
    """`say(part, text)` is how it speaks to the person at the terminal."""

    def __init__(self, name: str, args: list[str], env: Mapping[str, str], folder: Path, lifeline: int, say: Say) -> None:
        self.name, self._args, self._env, self._lifeline, self._say = name, args, env, lifeline, say
        self.log = folder / f"{name}.log"
        self.address = ""
        self.process: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self._read_to = 0
        self._stopping = False

    # --- up

    async def start(self) -> bool:
        """Starts it and waits until it says that it works. False: it ended before, or was silent for too long."""
        _shorten(self.log)
        self._read_to = self.log.stat().st_size if self.log.exists() else 0
        ours, theirs = os.pipe()
        command = [sys.executable, "-m", "scriptdispatch", *self._args]
        command += ["--lifeline", str(self._lifeline), "--ready-fd", str(theirs)]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                # Straight into the file: a pipe through us would break their last words if we are killed.
                stderr=log,
                env=dict(self._env),
                pass_fds=(self._lifeline, theirs),
                # Ctrl-C is for us: we stop them one after the other.
                process_group=0,
            )
        os.close(theirs)
        return await self._is_up(ours)

    async def _is_up(self, fd: int) -> bool:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
        try:
            async with asyncio.timeout(READY_S):
                line = await reader.readline()
        except TimeoutError:
            return False
        finally:
            transport.close()
        self.address = line.decode(errors="replace").strip()
        return line.endswith(b"\n")

    async def keep(self) -> None:
        """Starts it again whenever it dies, with back-off, until `stop`."""
        while not self._stopping:
            assert self.process is not None
            began = time.monotonic()
            code = await self.process.wait()
            if self._stopping:
                return
            self.tell_news()
            self._deaths = 1 if time.monotonic() - began > SHORT_LIFE_S else self._deaths + 1
            delay_s = min(MAX_BACK_OFF_S, 0.5 * 2 ** (self._deaths - 1))
            self._say(self.name, f"{ended(code)} (see {self.log}); starts again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            if not self._stopping and await self.start():
                self._say(self.name, "is back")

    # --- down

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Asks it to end and waits: for `grace_s`, or if there is a hurry 3 s at most. Then it is killed."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        if not await _gone(process, grace_s, hurry):
            self._signal(signal.SIGTERM)  # a second one hurries
            if not await _gone(process, 3.0, None):
                self._say(self.name, f"does not end: killed (see {self.log})")
                self._signal(signal.SIGKILL)
                await process.wait()
        self.tell_news()

    def revive(self) -> None:
        """After a `stop`: it may be started and kept again."""
        self._stopping = False

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, which is what we want
                self.process.send_signal(number)

    # --- what it says

    async def listen(self) -> None:
        """Shows warnings and errors of its log file. Looks at the file's size twice a second, which costs nothing worth
        mentioning; nothing waits for it."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.tell_news()

    def tell_news(self) -> None:
        for line in self._new_lines():
            text = worth_saying(line)
            # While it stops, that its own parts end is no news.
            if text is not None and not (self._stopping and text.startswith("warning")):
                self._say(self.name, text)

    def last_words(self, count: int = 8) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [clean(line) for line in lines[-count:]]

    def _new_lines(self) -> list[str]:
        if not self.log.exists() or self.log.stat().st_size <= self._read_to:
            return []
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            news = log.read(256 * 1024)
        whole = news.rpartition(b"\n")[0]
        self._read_to += len(whole) + 1 if whole or news.startswith(b"\n") else 0
        return whole.decode(errors="replace").splitlines()


def ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def worth_saying(line: str) -> str | None:
    """A warning or error as one line for people; None for what is only worth keeping."""
    if not line.startswith("{"):
        # Not one of our log lines: the interpreter's complaint, or what a command says before it can log.
        return clean(line) if line.strip() and not line.startswith(("lab of ", " ")) else None
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return clean(line)
    if row.get("level") not in LOUD:
        return None
    hidden = ("level", "timestamp", "event", "room", "process", "id", "event_name", "exception")
    facts = " ".join(f"{name}={value}" for name, value in row.items() if name not in hidden)
    return clean(f"{row['level']}: {row.get('event')} {facts}".strip())[:500]


async def _gone(process: asyncio.subprocess.Process, limit_s: float, hurry: asyncio.Event | None) -> bool:
    """Waits for its end, not longer than the limit nor into the hurry."""
    end = asyncio.ensure_future(process.wait())
    waits: list[asyncio.Future[Any]] = [end]
    if hurry is not None:
        waits.append(asyncio.ensure_future(hurry.wait()))
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return process.returncode is not None
    finally:
        for one in waits:
            one.cancel()


def _shorten(log: Path) -> None:
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
