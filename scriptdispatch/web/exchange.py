"""Reading a request's JSON and writing an answer's. Strict in, fast out."""

import asyncio
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch.errors import Refused
from scriptdispatch.services.bodies import Body
from scriptdispatch.services.fields import all_invalid, field_errors, invalid

BODY_WITHIN_S = 60.0
B = TypeVar("B", bound=Body)


async def read_json(request: Request) -> Any:
    """The body as JSON. NaN, bad UTF-8, two documents, too much depth: 422. Anything but JSON is refused, so that no
    page of another site can send a form here."""
    kinds = request.headers.getlist("content-type")
    if len(kinds) > 1 or (kinds and kinds[0].partition(";")[0].strip().lower() != "application/json"):
        raise invalid("Content-Type", "must be application/json")
    return decode(await _raw(request))


async def _raw(request: Request) -> bytes:
    """All of the body; `frame` has an eye on its size."""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            return await request.body()
    except TimeoutError:
        raise invalid("body", f"did not arrive within {BODY_WITHIN_S:.0f} s") from None


def decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except UnicodeDecodeError:
        raise invalid("body", "is not UTF-8") from None
    except RecursionError:
        raise invalid("body", "is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise invalid("body", f"is not JSON: {error}") from None


async def read_body(request: Request, model: type[B], *, optional: bool = False) -> B:
    """The body as one of `services.bodies`, or 422 naming each wrong field."""
    if optional and not await _raw(request):
        return model()
    return checked(await read_json(request), model)


def checked(body: Any, model: type[B]) -> B:
    if not isinstance(body, dict):
        raise invalid("body", "must be a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise all_invalid(field_errors(error.errors(include_url=False, include_input=False))) from None


def encode(content: Any) -> bytes:
    return msgspec.json.encode(content)


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")


def too_many(retry_after_s: int, detail: str) -> Refused:
    return Refused(429, "too_many_requests", detail, headers={"Retry-After": str(retry_after_s)})
