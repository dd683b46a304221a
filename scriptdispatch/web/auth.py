"""Who asks, and may they? One gate for every route; a route cannot be registered without saying its scope (routes.py).

Without any token the API is open to this machine only. A browser on this machine could be made to ask by any web page it
shows, so an open API answers only to names of this machine, and to no request that a browser marks as cross-site.
"""

from functools import lru_cache
from ipaddress import ip_address

from starlette.requests import Request

from scriptdispatch.errors import Refused
from scriptdispatch.services.tokens import ANONYMOUS, Principal, TokenBook
from scriptdispatch.web.exchange import too_many
from scriptdispatch.web.limits import Buckets

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="scriptdispatch"'}


class Gate:
    def __init__(self, book: TokenBook, buckets: Buckets) -> None:
        self._book, self._buckets = book, buckets

    async def admit(self, request: Request, scope: str, *, limited: bool) -> Principal:
        """The caller, or 401, 403, 429."""
        who = await self._who(request)
        caller = who.id if who is not ANONYMOUS else f"@{request.client.host if request.client else ''}"
        if limited and (wait_s := self._buckets.take(caller)):
            raise too_many(wait_s, "more requests than rate_limit_per_second allows; batch them, or wait")
        if not who.may(scope):
            raise Refused(403, "forbidden", f"this needs the scope {scope}; the token has: {', '.join(sorted(who.scopes))}")
        return who

    async def _who(self, request: Request) -> Principal:
        if await self._book.is_open():
            _check_local(request)
            return ANONYMOUS
        given = request.headers.getlist("authorization")
        if len(given) != 1 or given[0][:7].lower() != "bearer ":
            raise Refused(401, "unauthorized", "send a token: Authorization: Bearer sd_<id>_<secret>", headers=CHALLENGE)
        who = await self._book.principal(given[0][7:].strip())
        if who is None:
            raise Refused(401, "unauthorized", "this token is unknown, expired or revoked", headers=CHALLENGE)
        return who


def _check_local(request: Request) -> None:
    if not _is_local(request.headers.get("host", "")):
        raise Refused(403, "forbidden", "no token is configured, so only this machine may ask, by 127.0.0.1 or localhost")
    if request.headers.get("sec-fetch-site") == "cross-site":
        raise Refused(403, "forbidden", "no token is configured, so pages of other sites may not ask")


@lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    """Of a Host header: `localhost:8080`, `127.0.0.1`, `[::1]:8080`."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
