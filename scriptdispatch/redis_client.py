"""The connection to Redis, and the only file that knows its library: its exceptions become ours here.

Commands of concurrent coroutines share one connection and travel together: sent at once when it is idle, collected while a
round trip is under way. A caller that is cancelled leaves its command running and the answer is dropped, so that no answer
ever reaches somebody else. Nothing is retried: a command whose answer was lost may have been carried out; its caller knows
whether to repeat it, and every script of ours can be repeated.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from scriptdispatch.errors import QueueUnavailable, ScriptdispatchError, SettingsError

Word = str | bytes | int | float
ROUND_TRIP_S = 5.0
CONNECT_S = 5.0
BATCH = 500  # commands of one round trip
MAX_WAITING = 20_000  # commands that wait for one: more come only when Redis has stopped answering
OLDEST = (6, 2)

# What people read; the first row that fits. Whatever Redis says, the queue does not answer: fail closed.
SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.AuthenticationError, "refuses the user or password in queue_url"),
    (exceptions.AuthorizationError, "refuses the user or password in queue_url"),
    (exceptions.NoPermissionError, "does not allow the user in queue_url what we need"),
    (exceptions.BusyLoadingError, "is still loading its data"),
    (exceptions.ReadOnlyError, "is a read-only replica: queue_url must name the primary"),
    (exceptions.OutOfMemoryError, "is out of memory (maxmemory)"),
    (exceptions.TimeoutError, "does not answer in time"),
    (exceptions.ConnectionError, "is not reachable"),
    (exceptions.ResponseError, "answers with an error"),
    (exceptions.RedisError, "cannot be used"),
    (TimeoutError, "does not answer in time"),
    (OSError, "is not reachable"),
)
REFUSALS = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
FOREIGN = (exceptions.RedisError, TimeoutError, OSError)


class ScriptUnknown(QueueUnavailable):
    """Redis has forgotten the script (SCRIPT FLUSH, a restart). It was not run."""


def ours(error: BaseException) -> ScriptdispatchError:
    if isinstance(error, exceptions.NoScriptError):
        return ScriptUnknown(str(error))
    for kind, sentence in SENTENCES:
        if isinstance(error, kind):
            detail = f": {error}" if str(error) else ""
            return QueueUnavailable(f"Redis {sentence}{detail}")
    raise error


class Script:
    """A Lua script, named by its hash once Redis knows it."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()


class Line:
    """One connection. After an error it is closed for good; there is no half-read answer to be mistaken for the next."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> "Line":
        """Raises SettingsError when Redis refuses us, QueueUnavailable when it does not answer."""
        try:
            options = dict(parse_url(url))
        except ValueError as error:
            raise SettingsError(f"queue_url: {error}") from None
        kind: Any = options.pop("connection_class", Connection)
        # Timeouts are ours (one for a whole round trip): with the library's own, blocking reads would end after 5 s.
        options |= {"socket_timeout": None, "socket_connect_timeout": CONNECT_S, "protocol": 2}
        connection: AbstractConnection = kind(**options, retry=Retry(NoBackoff(), 0))
        line = cls(connection)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except FOREIGN as error:
            line.drop()
            raise SettingsError(str(ours(error))) if isinstance(error, REFUSALS) else ours(error) from None
        return line

    @property
    def alive(self) -> bool:
        """False once the server has closed it, as one does with a connection that was idle for long."""
        reader = self._connection._reader
        return reader is not None and not reader.at_eof()

    async def exchange(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """One round trip. An error that Redis answers to one command stands in its place, as ours."""
        try:
            async with asyncio.timeout(ROUND_TRIP_S):
                await self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
                return [await self._answer() for _ in commands]
        except FOREIGN as error:
            self.drop()
            raise ours(error) from None
        except BaseException:
            self.drop()
            raise

    async def _answer(self) -> Any:
        try:
            return await self._connection.read_response()
        except exceptions.ResponseError as error:
            return ours(error)

    def write(self, *words: Word) -> None:
        """At once, without waiting for anything: for the few short commands of a listener."""
        writer = self._connection._writer
        if writer is not None:
            writer.writelines(self._connection.pack_command(*words))

    async def read(self) -> Any:
        """The next thing that Redis says, whenever that is. Not to be cancelled if the line is to be used further."""
        try:
            return await self._connection.read_response(disconnect_on_error=False)
        except FOREIGN as error:
            self.drop()
            raise ours(error) from None

    def drop(self) -> None:
        """Closes without waiting."""
        self._connection._parser.on_disconnect()  # type: ignore[no-untyped-call]
        self._connection._close()  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class _Call:
    words: Sequence[Word]
    answer: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RedisClient:
    """Shared by queue, locks, leases and events of a process. Used from one loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = "?"
        self._line: Line | None = None
        self._waiting: deque[_Call] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._opened = False

    async def open(self) -> None:
        """Refuses a server that would lose what it was given: SettingsError says what to change."""
        facts = _facts(await self.command("INFO", "server")) | _facts(await self.command("INFO", "memory"))
        self.version = facts.get("redis_version", "?")
        if tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit()) < OLDEST:
            raise SettingsError(f"queue_url: this is Redis {self.version}; 6.2 or newer is needed")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SettingsError(
                f"queue_url: Redis has maxmemory-policy {policy} and would drop queue and locks when it is full: "
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in redis.conf)"
            )
        self._opened = True

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.wait({self._sender}, timeout=ROUND_TRIP_S)
        if self._line is not None:
            self._line.drop()
            self._line = None

    async def command(self, *words: Word) -> Any:
        if len(self._waiting) >= MAX_WAITING:
            raise QueueUnavailable("Redis does not answer in time: too many commands wait for it")
        call = _Call(words)
        self._waiting.append(call)
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send())
        answer = await call.answer
        if isinstance(answer, ScriptdispatchError):
            raise type(answer)(*answer.args)  # one for each caller: several may share the answer
        return answer

    async def run(self, script: Script, key: str, *arguments: Word) -> Any:
        try:
            return await self.command("EVALSHA", script.sha, 1, key, *arguments)
        except ScriptUnknown:
            return await self.command("EVAL", script.source, 1, key, *arguments)

    async def _send(self) -> None:
        """One round trip after the other until nobody waits. Its own task: no caller's cancellation reaches it."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                try:
                    answers = await self._exchange([call.words for call in batch])
                except ScriptdispatchError as error:
                    # Who came meanwhile has waited as long as it takes to know that Redis does not answer.
                    batch += self._waiting
                    self._waiting.clear()
                    answers = [error] * len(batch)
                except BaseException:  # the loop ends
                    for call in (*batch, *self._waiting):
                        call.answer.cancel()
                    raise
                for call, answer in zip(batch, answers, strict=True):
                    if not call.answer.done():
                        call.answer.set_result(answer)
        finally:
            self._sender = None

    async def _exchange(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        try:
            if self._line is not None and not self._line.alive:
                self._line.drop()
                self._line = None
            if self._line is None:
                self._line = await Line.open(self.url)
            return await self._line.exchange(commands)
        except SettingsError as error:
            if not self._opened:
                raise
            raise QueueUnavailable(str(error)) from None  # it was right when we started
        except BaseException:
            self._line = None
            raise


def _facts(info: bytes) -> dict[str, str]:
    rows = (row.partition(":") for row in info.decode().splitlines())
    return {name: value for name, _, value in rows if value}
