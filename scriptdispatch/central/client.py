"""Central control as workers, web and reconciler see it: push, device, cancel, probe. One instance per process and loop.

Pushes have their own pool, as large as what may be in flight, so that nothing else can take a push's place; questions
(device, cancel, probe) have a small one. What an answer to a push means is decided in `outcomes`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec
from msgspec import Struct

from scriptdispatch.central.http import LARGE_ANSWER, Connection, Pool
from scriptdispatch.central.http_link import Broken, Misconfigured, NotSent, Response, Trouble
from scriptdispatch.central.outcomes import PushAnswer, judge
from scriptdispatch.clock import Clock
from scriptdispatch.domain.lifecycle import POST_LIMIT_S
from scriptdispatch.errors import CentralUnavailable, ScriptdispatchError
from scriptdispatch.settings import Settings

ASK_LIMIT_S: Final = 10.0  # one question, answered or not
ASKS_AT_ONCE: Final = 64
DEVICES_KEPT: Final = 10_000
FRESH_TRIES: Final = 2  # connections that may be found closed before a push counts as not sent
JSON_TYPE: Final = b"Content-Type: application/json\r\n"
NOT_SET: Final = (
    "central_url is not set: give the address of central control in SCRIPTDISPATCH_CENTRAL_URL, "
    "or start everything with `scriptdispatch dev`"
)


class PushRequest(Struct, frozen=True, kw_only=True):
    """The body of a push (SPEC 5). `sha256` is of `script`, the rendered text."""

    execution_id: str
    task_id: str
    device_id: str | None
    language: str | None
    script: str | None
    sha256: str | None
    params: dict[str, Any] | None
    timeout_seconds: int
    attempt: int
    fencing_token: int | None


class PushFailed(ScriptdispatchError):
    """There is no connection to push over, so nothing was sent: `not_sent` or `misconfigured`."""

    def __init__(self, answer: PushAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


class CentralControl:
    def __init__(self, settings: Settings, clock: Clock, *, limit: int) -> None:
        self._clock = clock
        self._paths = (settings.central_device_path, settings.central_push_path, settings.central_cancel_path)
        self._five_xx_means_refused = settings.central_5xx_means_refused
        self._cache_s = settings.device_cache_seconds
        self._known: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[dict[str, Any] | None]] = {}
        self._pushes: Pool | None = None
        self._asks: Pool | None = None
        if settings.central_url is not None:
            token = settings.central_token
            headers = [("Authorization", f"Bearer {token}")] if token else []
            self._pushes = Pool(settings.central_url, limit, headers=headers)
            self._asks = Pool(settings.central_url, ASKS_AT_ONCE, headers=headers, pool_timeout_s=ASK_LIMIT_S)

    async def close(self) -> None:
        for ask in list(self._asking.values()):
            ask.cancel()
        for pool in (self._pushes, self._asks):
            if pool is not None:
                await pool.close()

    # ----------------------------------------------------------------------------------------------------------- push

    async def checkout(self) -> Connection:
        """A connection to push over, taken before the stamp (W5). Raises `PushFailed`. Not pushing after all:
        `release()` it."""
        if self._pushes is None:
            raise PushFailed(PushAnswer(outcome="misconfigured", message=NOT_SET))
        try:
            return await self._pushes.checkout()
        except Trouble as trouble:
            raise PushFailed(judge(trouble, execution_id="", now=self._clock.now())) from trouble

    async def push(
        self,
        connection: Connection,
        request: PushRequest,
        *,
        before_first_byte: Callable[[], bool] | None = None,
        in_doubt: bool = False,
    ) -> PushAnswer:
        """W6. Ends within POST_LIMIT_S, gives the connection back, and raises nothing but CancelledError (then the
        outcome is unknown, unless `before_first_byte` was never asked). `before_first_byte` is asked right before the
        first byte; False: nothing is sent, `not_sent`."""
        with connection:
            try:
                body = msgspec.json.encode(request)
            except (TypeError, ValueError) as error:
                return PushAnswer(outcome="refused", message=f"the script cannot be written as JSON: {error}")
            try:
                came: Response | Trouble = await self._post(connection, body, before_first_byte)
            except Trouble as trouble:
                came = trouble
        return judge(
            came,
            execution_id=request.execution_id,
            now=self._clock.now(),
            in_doubt=in_doubt,
            five_xx_means_refused=self._five_xx_means_refused,
        )

    async def _post(self, connection: Connection, body: bytes, before_first_byte: Callable[[], bool] | None) -> Response:
        loop = asyncio.get_running_loop()
        end = loop.time() + POST_LIMIT_S
        for left in range(FRESH_TRIES, -1, -1):
            try:
                return await connection.request(
                    "POST",
                    self._paths[1],
                    body,
                    JSON_TYPE,
                    timeout_s=max(0.0, end - loop.time()),
                    before_first_byte=before_first_byte,
                )
            except NotSent as trouble:
                if trouble.vetoed or not left:
                    raise
            # The server closed the idle connection under our hands: provably unsent, so a fresh one may carry it. If
            # connecting takes long, the clock check stops it.
            await connection.reconnect()
        raise AssertionError("unreachable")

    # ------------------------------------------------------------------------------------------------------ questions

    async def device(self, device_id: str) -> dict[str, Any] | None:
        """The device as central control knows it, None if it does not. A positive answer counts for
        `device_cache_seconds`; who asks for the same device at the same time shares one question."""
        now = self._clock.uptime()
        known = self._known.get(device_id)
        if known is not None and now < known[0]:
            self._known.move_to_end(device_id)
            return known[1]
        ask = self._asking.get(device_id)
        if ask is None:
            ask = self._asking[device_id] = asyncio.create_task(self._ask_device(device_id))
            ask.add_done_callback(lambda done: self._answered(device_id, done))
        try:
            return await asyncio.shield(ask)  # one asker who leaves does not take the answer from the others
        except asyncio.CancelledError:
            if ask.cancelled():
                raise CentralUnavailable("the question was given up: this process is closing") from None
            raise

    async def cancel(self, execution_id: str) -> Literal["will_try", "never_had"]:
        path = self._paths[2].replace("{execution_id}", _segment(execution_id))
        response = await self._ask("POST", path)
        if 200 <= response.status < 300:
            return "will_try"
        if response.status == 404:
            return "never_had"
        raise _not_understood("cancel", response)

    async def probe(self) -> None:
        """Is it there and does it let us in? Any answer but a redirect, a refused token and a 5xx is a yes."""
        response = await self._ask("GET", self._paths[0].replace("{device_id}", "probe"))
        if 300 <= response.status < 400 or response.status in (401, 403) or response.status >= 500:
            raise _not_understood("a probe", response)

    async def _ask_device(self, device_id: str) -> dict[str, Any] | None:
        path = self._paths[0].replace("{device_id}", _segment(device_id))
        response = await self._ask("GET", path)
        if response.status == 404:
            return None
        if response.status != 200 or response.truncated:
            raise _not_understood(f"the question for device {device_id}", response)
        try:
            return msgspec.json.decode(response.body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise CentralUnavailable(
                f"what central control says about device {device_id} is no JSON object: {error}"
            ) from error

    def _answered(self, device_id: str, done: "asyncio.Task[dict[str, Any] | None]") -> None:
        self._asking.pop(device_id, None)
        if done.cancelled() or done.exception() is not None:
            return
        device = done.result()
        if device is not None and self._cache_s > 0:
            self._known[device_id] = (self._clock.uptime() + self._cache_s, device)
            self._known.move_to_end(device_id)
            while len(self._known) > DEVICES_KEPT:
                self._known.popitem(last=False)

    async def _ask(self, method: str, path: str) -> Response:
        """A question may be repeated: once more over a fresh connection if the first broke."""
        if self._asks is None:
            raise CentralUnavailable(NOT_SET)
        try:
            with await self._asks.checkout() as connection:
                try:
                    return await connection.request(method, path, timeout_s=ASK_LIMIT_S / 2, cap=LARGE_ANSWER)
                except (NotSent, Broken):
                    await connection.reconnect()
                    return await connection.request(method, path, timeout_s=ASK_LIMIT_S / 2, cap=LARGE_ANSWER)
        except Misconfigured as trouble:
            raise CentralUnavailable(f"central control cannot be reached as it is configured: {trouble}") from trouble
        except Trouble as trouble:
            raise CentralUnavailable(f"central control does not answer: {trouble}") from trouble


def _segment(value: str) -> str:
    """One segment of a path. `.` and `..` would be taken for steps in the tree, so they are written out."""
    return value.replace(".", "%2E") if value in (".", "..") else quote(value, safe="")


def _not_understood(what: str, response: Response) -> CentralUnavailable:
    redirect = (
        f" to {response.headers.get('location', 'nowhere')[:200]!r}, not followed" if 300 <= response.status < 400 else ""
    )
    return CentralUnavailable(f"central control answered {what} with HTTP {response.status}{redirect}")
