"""The lab's outbox: execution-log messages on their way to the product, by HTTP (`HttpCarrier`) or otherwise.

One batch is under way at a time, so messages arrive in the order in which they were put. The first leaves at once; what
comes meanwhile is collected. Nothing grows without bound: beyond MAX_WAITING messages (or MAX_BYTES) producers wait in
`room`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from scriptdispatch import logs
from scriptdispatch.central.http import LARGE_ANSWER, Pool, Response, Trouble

BATCH: Final = 500
BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_WAITING: Final = 50_000
MAX_BYTES: Final = 64 * 1024 * 1024
APART_S: Final = 0.01  # by HTTP, from the start of one batch to the next: leaves room under the API's rate limit
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
SENDING_S: Final = 30.0
PATH: Final = "/api/v1/execution-logs"
JSON_TYPE: Final = b"Content-Type: application/json\r\n"
WRONG_TOKEN: Final = ": set SCRIPTDISPATCH_TOKEN to a token of the service with the scope log:write"
log = logs.get("lab")


class Parcel(Struct):
    """One encoded message and its device. `receipt` is what `on_delivered` gets when the product has it."""

    body: bytes
    receipt: Any = None
    key: str | None = None


class Carrier(Protocol):
    """One way to the product."""

    apart_s: float  # from the start of one batch to the start of the next

    async def deliver(self, batch: Sequence[Parcel]) -> int:
        """Until the product has them, or has said that it does not want them: how many it did not want."""
        ...

    async def close(self) -> None: ...


class Patience:
    """While the product is away it is tried for ever, with back-off; a restart is nothing to speak of."""

    def __init__(self, who: str) -> None:
        self._who, self._pause_s, self._tries = who, FIRST_PAUSE_S, 0

    async def pause(self, trouble: str) -> None:
        self._tries += 1
        if self._tries in (3, 10) or self._tries % 60 == 0:
            log.warning(f"lab.{self._who}_away", trouble=trouble, tries=self._tries)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)


class Answer(Struct):
    accepted: int = 0
    rejected: list[dict[str, Any]] = []


class Outbox:
    """With no `carrier` there is nobody to deliver to, and messages are dropped."""

    def __init__(self, carrier: Carrier | None, on_delivered: Callable[[list[Any]], None] | None = None) -> None:
        self._carrier = carrier
        self._on_delivered = on_delivered
        self._waiting: deque[Parcel] = deque()
        self._bytes = 0
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._sender: asyncio.Task[None] | None = None
        self.delivered = self.rejected = 0

    def start(self) -> None:
        if self._carrier is not None:
            self._sender = asyncio.create_task(self._send_all(self._carrier), name="lab-outbox")

    def put(self, parcels: Sequence[Parcel]) -> None:
        """Never refuses: a producer asks `full` or waits for `room` before it makes more."""
        if self._carrier is None or not parcels:
            return
        self._waiting.extend(parcels)
        self._bytes += sum(len(parcel.body) for parcel in parcels)
        self._something.set()
        self._empty.clear()
        if self.full:
            self._room.clear()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING or self._bytes >= MAX_BYTES

    async def room(self) -> None:
        await self._room.wait()

    async def flush(self, within_s: float) -> bool:
        """Wait until everything is delivered; False if that took too long."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        if self._carrier is not None:
            await self._carrier.close()

    async def _send_all(self, carrier: Carrier) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time() - carrier.apart_s
        while True:
            await self._something.wait()
            if (early_s := begun + carrier.apart_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            begun = loop.time()
            batch = self._next_batch()
            refused = await carrier.deliver(batch)
            self.delivered += len(batch) - refused
            self.rejected += refused
            self._hand_in(batch)
            self._forget(batch)

    def _hand_in(self, batch: list[Parcel]) -> None:
        receipts = [parcel.receipt for parcel in batch if parcel.receipt is not None]
        if receipts and self._on_delivered is not None:
            self._on_delivered(receipts)

    def _next_batch(self) -> list[Parcel]:
        """The oldest messages. They stay in the queue until they are delivered, so that they count as waiting."""
        batch: list[Parcel] = []
        size = 0
        for parcel in self._waiting:
            size += len(parcel.body)
            if len(batch) == BATCH or (batch and size > BATCH_BYTES):
                break
            batch.append(parcel)
        return batch

    def _forget(self, batch: list[Parcel]) -> None:
        for parcel in batch:
            self._waiting.popleft()
            self._bytes -= len(parcel.body)
        if not self._waiting:
            self._something.clear()
            self._empty.set()
        if not self.full:
            self._room.set()


class HttpCarrier:
    """By `POST /api/v1/execution-logs`."""

    apart_s = APART_S

    def __init__(self, url: str, token: str | None) -> None:
        self._pool = Pool(url, 2, headers=[("Authorization", f"Bearer {token}")] if token else [])

    async def close(self) -> None:
        await self._pool.close()

    async def deliver(self, batch: Sequence[Parcel]) -> int:
        response = await self._post_until_answered(batch)
        if response.status == 202:
            return _count_rejected(response)
        if len(batch) > 1:  # one of them makes the whole batch unreadable or too large: find it
            half = len(batch) // 2
            return await self.deliver(batch[:half]) + await self.deliver(batch[half:])
        refuse(batch[0], f"HTTP {response.status}")
        return 1

    async def _post_until_answered(self, batch: Sequence[Parcel]) -> Response:
        body = b'{"messages":[' + b",".join(parcel.body for parcel in batch) + b"]}"
        patience = Patience("api")
        while True:
            try:
                with await self._pool.checkout() as connection:
                    response = await connection.request("POST", PATH, body, JSON_TYPE, timeout_s=SENDING_S, cap=LARGE_ANSWER)
                if response.status in (202, 400, 413, 422):
                    return response
                trouble = f"HTTP {response.status}{WRONG_TOKEN if response.status in (401, 403) else ''}"
            except Trouble as error:
                trouble = str(error)
            await patience.pause(trouble)


def refuse(parcel: Parcel, reason: str) -> None:
    """The product does not want it: said once, and not tried again."""
    log.warning("lab.message_refused", reason=reason, message=parcel.body[:300].decode(errors="replace"))


def _count_rejected(response: Response) -> int:
    try:
        answer = msgspec.json.decode(response.body, type=Answer)
    except msgspec.MsgspecError as error:
        log.warning("lab.odd_answer", error=str(error))
        return 0
    for row in answer.rejected[:10]:
        log.warning("lab.message_rejected", reason=str(row.get("reason"))[:300], index=row.get("index"))
    return len(answer.rejected)
