"""Tokens `sd_<id>_<secret>`: who may do what (SPEC 11). Those of the settings have all scopes; the others are stored.

Stored hashed; a secret is shown once, when it is made. What is read from the store counts for a second at most, so a
revocation takes effect at once everywhere. Once a token was ever stored, the API stays closed: a revoked or expired last
token never opens it again.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import RETRY, WAITING, Status, Task, Token
from scriptdispatch.errors import Refused
from scriptdispatch.store.port import Store, TaskFilter

SCOPES: Final = ("task:read", "task:write", "device:read", "lock:force", "type:write", "log:write", "admin")
FRESH_S: Final = 1.0
QUEUED: Final[tuple[Status, ...]] = (WAITING, RETRY)
PAGE: Final = 500
AT_ONCE: Final = 32  # cancels that the store may commit together
Cancel = Callable[..., Awaitable[Any]]  # Actions.cancel
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"


class Principal(Struct, frozen=True, kw_only=True):
    """Who asks. `id` keys limits and idempotency; `name` is what history shows."""

    id: str
    name: str
    scopes: frozenset[str]
    expires_at: datetime | None = None

    def may(self, scope: str) -> bool:
        """`admin` can make itself any token, so it has every scope. "any" asks for a valid token only."""
        return scope == "any" or scope in self.scopes or "admin" in self.scopes


ANONYMOUS: Final = Principal(id="anonymous", name="anonymous", scopes=frozenset(SCOPES))


class TokenBook:
    def __init__(self, store: Store, clock: Clock, configured: Sequence[str]) -> None:
        self._store, self._clock = store, clock
        self._configured = {id: (id, digest(secret)) for id, secret in map(split, configured)}
        self._stored: dict[str, Token] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def is_open(self) -> bool:
        """No token is configured or was ever stored."""
        return not self._configured and not await self._tokens()

    async def principal(self, text: str) -> Principal | None:
        """Whose token this is; None if it is nobody's, expired or revoked. The hash is compared in constant time, also
        for an id that does not exist."""
        try:
            id, secret = split(text)
        except ValueError:
            return None
        given = digest(secret)
        if id in self._configured:
            name, known = self._configured[id]
            return Principal(id=id, name=name, scopes=frozenset(SCOPES)) if hmac.compare_digest(given, known) else None
        token = (await self._tokens()).get(id)
        if not hmac.compare_digest(given, token.hash if token else digest("")) or token is None:
            return None
        if not self._valid(token):
            return None
        return Principal(id=token.id, name=token.name, scopes=frozenset(token.scopes), expires_at=token.expires_at)

    async def still_valid(self, principal: Principal) -> bool:
        """For a stream: its token is neither revoked nor expired yet."""
        if principal.id == ANONYMOUS.id:
            return await self.is_open()
        if principal.id in self._configured:
            return True
        token = (await self._tokens()).get(principal.id)
        return token is not None and self._valid(token)

    async def create(self, name: str, scopes: Iterable[str], expires_at: datetime | None) -> tuple[Token, str]:
        """The stored token, and the text that its owner keeps: it is not to be had again."""
        now = self._clock.now()
        if expires_at is not None and expires_at <= now:
            raise Refused(422, "validation_error", "expires_at is past", [("expires_at", "must be in the future")])
        id = "".join(secrets.choice(_ALPHABET) for _ in range(10))
        secret = secrets.token_urlsafe(32)
        chosen = list(dict.fromkeys(scopes))
        token = Token(id=id, name=name, hash=digest(secret), scopes=chosen, created_at=now, expires_at=expires_at)
        await self._store.save_token(token)
        self._read_at = None
        return token, f"sd_{id}_{secret}"

    async def list(self) -> "list[Token]":
        return sorted(await self._store.tokens(), key=lambda token: token.created_at, reverse=True)

    async def revoke(self, id: str, *, alone: bool = False) -> Token:
        """Idempotent: a token that is revoked keeps its first time. `alone`: refused while another token has the same name,
        for tasks know their creator by name only."""
        tokens = await self._store.tokens()
        token = next((token for token in tokens if token.id == id), None)
        if token is None:
            raise Refused(404, "not_found", f"there is no stored token {id}; those of the settings are removed there")
        if alone and (
            token.name in self._configured or any(o.id != id and o.name == token.name and self._valid(o) for o in tokens)
        ):
            raise Refused(
                409, "name_shared", f"another token is named {token.name}, too, and their tasks cannot be told apart"
            )
        if token.revoked_at is None:
            token = msgspec.structs.replace(token, revoked_at=self._clock.now())
            await self._store.save_token(token)
        self._read_at = None
        return token

    async def cancel_tasks(self, token: Token, cancel: Cancel, *, actor: str) -> int:
        """Cancels what waits (also for a retry) and was created under the token's name; answers how many. What has begun
        meanwhile goes on. May be repeated. Bounded by what waits: walks it by status, page by page, newest first."""
        canceled, last = 0, None
        while True:
            where = TaskFilter(statuses=QUEUED, before_id=last)
            page = await self._store.list_tasks(where, PAGE)
            own = [task for task in page if task.created_by == token.name]
            for some in _batched(own, AT_ONCE):
                done = await asyncio.gather(*(_cancel(task, cancel, actor, token) for task in some))
                canceled += sum(done)
            if len(page) < PAGE:
                return canceled
            last = page[-1].id

    def _valid(self, token: Token) -> bool:
        return token.revoked_at is None and (token.expires_at is None or token.expires_at > self._clock.now())

    async def _tokens(self) -> dict[str, Token]:
        if not self._is_fresh():
            async with self._reading:  # one reader for all who came meanwhile
                if not self._is_fresh():
                    asked_at = self._clock.uptime()
                    self._stored = {token.id: token for token in await self._store.tokens()}
                    self._read_at = asked_at
        return self._stored

    def _is_fresh(self) -> bool:
        return self._read_at is not None and self._clock.uptime() - self._read_at < FRESH_S


async def _cancel(task: Task, cancel: Cancel, actor: str, token: Token) -> bool:
    """False: it does not wait any more, somebody was faster."""
    reason = f"token {token.id} ({token.name}) was revoked"
    try:
        await cancel(task.id, actor=actor, reason=reason, expected_status=task.status)
    except Refused as refused:
        if refused.code in ("illegal_state", "task_not_found"):
            return False
        raise
    return True


def _batched(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    return (tasks[start : start + size] for start in range(0, len(tasks), size))


def split(text: str) -> tuple[str, str]:
    parts = text.split("_", 2)
    if len(parts) != 3 or parts[0] != "sd" or not parts[1] or not parts[2]:
        raise ValueError("a token is sd_<id>_<secret>")
    return parts[1], parts[2]


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
