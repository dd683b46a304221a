"""The outermost layer of the web process: bodies are counted as they come, bugs become problems, answers get headers.

Plain ASGI, so nothing is buffered here. A body is refused as soon as it is known to be too long, by its declared length
or by what has arrived; what is still under way is thrown away by the server without being kept.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scriptdispatch.web.problems import internal_error, problem

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class TooLarge(Exception):
    pass


class Frame:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._limit = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            message = await receive()
            if message["type"] == "http.request":
                arrived += len(message.get("body", b""))
                if arrived > self._limit:
                    raise TooLarge
            return message

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if _declared(scope) > self._limit:
                raise TooLarge
            await self._app(scope, counted, with_headers)
        except TooLarge:
            if not started:
                detail = f"a body may have {self._limit} bytes"
                await problem(413, "payload_too_large", detail)(scope, receive, with_headers)
        except Exception as error:
            answer = internal_error(scope["path"], error)
            if started:  # half an answer is out; the client sees it break off, the log says why
                raise
            await answer(scope, receive, with_headers)


def _declared(scope: Scope) -> int:
    text = Headers(scope=scope).get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else 0
