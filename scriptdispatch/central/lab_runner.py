"""The lab's devices, for real: each script is a subprocess in its own session and folder, its output streamed as it comes.

Time-out and cancel end the whole process group (TERM, then KILL after TERM_S). When the script itself has ended, what it
left running in its group is ended too: a device is free when its execution is over.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from scriptdispatch import logs
from scriptdispatch.central.client import PushRequest
from scriptdispatch.central.lab_lines import Lines, progress
from scriptdispatch.central.lab_outbox import Outbox
from scriptdispatch.central.lab_voice import Voice

TERM_S: Final = 2.0  # from TERM to KILL
QUIET_S: Final = 1.0  # an ended script's pipes that stay open and silent this long are held by what it left running
SUFFIX: Final = {"shell": "script.sh", "python": "script.py"}
STREAM: Final = {1: "stdout", 2: "stderr"}
log = logs.get("lab")


class Run(asyncio.SubprocessProtocol):
    """One script. Everything it says goes to its voice; with a full outbox its pipes are not read, and it waits."""

    def __init__(self, push: PushRequest, voice: Voice, outbox: Outbox, folder: Path) -> None:
        self._push, self._voice, self._outbox, self._folder = push, voice, outbox, folder
        self._lines = {1: Lines(), 2: Lines()}
        self._open = {1, 2}
        self._news = asyncio.Event()  # exited, canceled, data or pipe closed
        self._exited = self._canceled = False
        self._heard = 0
        self._resuming: asyncio.Task[None] | None = None
        self._transport: asyncio.SubprocessTransport | None = None

    def cancel(self) -> None:
        self._canceled = True
        self._news.set()

    async def carry_out(self) -> tuple[str, dict[str, Any]]:
        """Run to the end; returns the terminal message's type and facts."""
        self._transport = await self._spawn()
        pid = self._transport.get_pid()
        try:
            (self._folder / "pid").write_text(str(pid))
            verdict = await self._until_over()
            if verdict != "ended":
                await self._end_group(pid)
            await self._drain(pid)
        finally:
            _signal_group(pid, signal.SIGKILL)
            if self._resuming is not None:
                self._resuming.cancel()
            self._transport.close()
        return self._result(verdict, self._transport.get_returncode())

    async def _spawn(self) -> asyncio.SubprocessTransport:
        language = self._push.language or "shell"
        script = self._folder / SUFFIX[language]
        script.write_text(self._push.script or "", newline="")
        program = sys.executable if language == "python" else shutil.which("bash") or "sh"
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            program,
            script.name,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._folder,
            env=_environment(self._push),
            start_new_session=True,
        )
        return transport

    async def _until_over(self) -> Literal["ended", "canceled", "timeout"]:
        try:
            async with asyncio.timeout(self._push.timeout_seconds):
                await self._until(lambda: self._exited or self._canceled)
        except TimeoutError:
            return "ended" if self._exited else "timeout"
        return "ended" if self._exited else "canceled"

    async def _end_group(self, pid: int) -> None:
        _signal_group(pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERM_S):
                await self._until(lambda: self._exited and not self._open)
        _signal_group(pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(TERM_S):
                await self._until(lambda: self._exited)
        except TimeoutError:
            log.error("lab.process_survives_kill", pid=pid, execution_id=self._push.execution_id)

    async def _drain(self, pid: int) -> None:
        """All that the script wrote before it ended is still in the pipes: read it before the terminal message."""
        for last_resort in (False, True):
            while self._open:
                await self._outbox.room()
                heard = self._heard
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._until(lambda: not self._open or self._heard != heard)  # noqa: B023 - awaited at once
                except TimeoutError:
                    break
            if last_resort or not self._open:
                return
            _signal_group(pid, signal.SIGKILL)  # silent and open: held by something left behind

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _result(self, verdict: str, code: int | None) -> tuple[str, dict[str, Any]]:
        if verdict == "canceled":
            return "CANCELED", {"error": {"code": "CANCELED", "message": "canceled and ended"}}
        if verdict == "timeout":
            message = f"the script was ended after its time limit of {self._push.timeout_seconds} s"
            return "FAILURE", {"error": {"code": "TIMEOUT", "message": message}}
        if code == 0:
            return "SUCCESS", {"exit_code": 0}
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            message, code = f"the script was ended by signal {name}", 128 - code
        else:
            message = f"the script ended with exit code {code}"
        return "FAILURE", {"exit_code": code, "error": {"code": "EXECUTION_FAILED", "message": message}}

    # ------------------------------------------------------------------------------------------------------ from asyncio

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._heard += 1
        self._speak(fd, self._lines[fd].feed(data))
        self._news.set()
        if self._outbox.full and self._resuming is None:
            self._pause()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd in self._open:
            self._open.discard(fd)
            self._speak(fd, self._lines[fd].end())
        self._news.set()

    def process_exited(self) -> None:
        self._exited = True
        self._news.set()

    def _speak(self, fd: int, lines: list[str]) -> None:
        for line in lines:
            moved = progress(line) if fd == 1 else None
            if moved is not None:
                self._voice.say_progress(*moved)
            else:
                self._voice.say_line(STREAM[fd], line)

    def _pause(self) -> None:
        for pipe in self._pipes():
            pipe.pause_reading()
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def _resume(self) -> None:
        await self._outbox.room()
        self._resuming = None
        for pipe in self._pipes():
            pipe.resume_reading()

    def _pipes(self) -> list[Any]:
        assert self._transport is not None
        return [pipe for fd in self._open if (pipe := self._transport.get_pipe_transport(fd)) is not None]


class Runner:
    """All scripts that run now."""

    def __init__(self, folder: Path, outbox: Outbox, on_end: Callable[[str], None]) -> None:
        self._folder, self._outbox, self._on_end = folder / "executions", outbox, on_end
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, push: PushRequest, voice: Voice) -> None:
        run = self._runs[push.execution_id] = Run(push, voice, self._outbox, self._folder / push.execution_id)
        task = asyncio.get_running_loop().create_task(self._run(push.execution_id, run, voice))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, execution_id: str) -> None:
        if (run := self._runs.get(execution_id)) is not None:
            run.cancel()

    async def stop(self) -> None:
        """End every script. Their executions are reported when the lab starts again."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, execution_id: str, run: Run, voice: Voice) -> None:
        folder = self._folder / execution_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kind, facts = await run.carry_out()
        except Exception as error:
            log.exception("lab.run_failed", execution_id=execution_id)
            kind = "FAILURE"
            facts = {"error": {"code": "EXECUTION_FAILED", "message": f"the lab could not run it: {error}"}}
        finally:
            self._runs.pop(execution_id, None)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._on_end(execution_id)  # first: whoever hears of the result may push the next one at once
        voice.end(kind, **facts)

    def end_left_over(self, execution_id: str) -> None:
        """A lab that was killed leaves its scripts running. End this one, if the recorded process is still it."""
        folder = self._folder / execution_id
        with suppress(OSError, ValueError):
            pid = int((folder / "pid").read_text())
            if f"SD_EXECUTION_ID={execution_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                _signal_group(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _environment(push: PushRequest) -> dict[str, str]:
    """Ours, without our own settings: a script must not find our tokens there."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SCRIPTDISPATCH_")}
    return {
        **ours,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        "SD_EXECUTION_ID": push.execution_id,
        "SD_TASK_ID": push.task_id,
        "SD_DEVICE_ID": push.device_id or "",
    }


def _signal_group(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
        os.killpg(pid, what)
