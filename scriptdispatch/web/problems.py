"""Every error of the API as `application/problem+json` (RFC 9457): bad input, unknown paths, parts that are away, bugs."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from scriptdispatch import logs
from scriptdispatch.errors import CentralUnavailable, Refused, StoreUnavailable, Unavailable
from scriptdispatch.ids import new_id
from scriptdispatch.services.fields import field_errors

TITLES: Mapping[str, str] = {
    "validation_error": "The request is not valid",
    "invalid_script": "The script is not valid",
    "device_not_found": "No such device",
    "type_not_found": "No such task type",
    "task_not_found": "No such task",
    "lock_not_found": "No lock",
    "not_found": "Not found",
    "method_not_allowed": "This method is not allowed here",
    "duplicate_task": "There is such a task already",
    "illegal_state": "Not possible in this state",
    "lock_changed": "The lock has changed hands",
    "idempotency_mismatch": "This key was used for another request",
    "central_unavailable": "Central control does not answer",
    "store_unavailable": "The store does not answer",
    "unauthorized": "A valid token is needed",
    "forbidden": "This token may not do that",
    "payload_too_large": "The body is too large",
    "too_many_requests": "Too many requests",
    "internal_error": "Internal error",
}
_BY_STATUS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
log = logs.get("web")


def problem(
    status: int,
    code: str,
    detail: str,
    errors: Sequence[Mapping[str, str]] = (),
    headers: Mapping[str, str] | None = None,
    **extra: Any,
) -> Response:
    return Response(
        msgspec.json.encode(problem_dict(status, code, detail, errors, **extra)),
        status,
        dict(headers or {}),
        media_type="application/problem+json",
    )


def problem_dict(
    status: int, code: str, detail: str, errors: Sequence[Mapping[str, str]] = (), **extra: Any
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": f"urn:scriptdispatch:problem:{code}",
        "title": TITLES.get(code, code.replace("_", " ")),
        "status": status,
        "detail": detail,
        "code": code,
    }
    if errors:
        body["errors"] = list(errors)
    return body | extra


def refusal_dict(error: Refused) -> dict[str, Any]:
    return problem_dict(error.status, error.code, error.detail, error.errors, **error.extra)


def install(app: FastAPI) -> None:
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(Unavailable, _unavailable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    extra = dict(error.extra)
    headers = extra.pop("headers", {})
    if error.status == 503:
        headers = {"Retry-After": "1", **headers}
    return problem(error.status, error.code, error.detail, error.errors, headers, **extra)


async def _unavailable(request: Request, error: Exception) -> Response:
    """Something we need is away. Said once in the log, without a traceback: it is not a bug."""
    log.warning("a part does not answer", event_name="web.unavailable", path=request.url.path, error=str(error))
    code = "central_unavailable" if isinstance(error, CentralUnavailable) else "store_unavailable"
    extra: dict[str, Any] = {}
    if isinstance(error, StoreUnavailable):
        extra["outcome"] = "unknown" if error.outcome_unknown else "nothing_stored"
    return problem(503, code, str(error), headers={"Retry-After": "1"}, **extra)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    rows = [{**row, "loc": row["loc"][1:] or row["loc"]} for row in error.errors()]
    found = field_errors(rows)
    detail = "; ".join(f"{field}: {message}" for field, message in found[:5])
    return problem(422, "validation_error", detail, [{"field": f, "message": m} for f, m in found[:100]])


async def _http(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = _BY_STATUS.get(error.status_code, "validation_error" if error.status_code < 500 else "internal_error")
    if error.status_code == 405:
        return _wrong_method(request)
    detail = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return problem(error.status_code, code, detail, headers=error.headers)


def _wrong_method(request: Request) -> Response:
    """The framework names only the methods of the first route that has this path."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    return problem(405, "method_not_allowed", f"{request.url.path[:200]} takes {allowed}", headers={"Allow": allowed})


async def _gone(_: Request, __: Exception) -> Response:
    """The client went away while it was sending: nobody reads this answer."""
    return Response(status_code=400)


def internal_error(path: str, error: Exception) -> Response:
    """A bug. The traceback goes to the log under an id; the caller gets the id and nothing else."""
    id = new_id()
    log.error("internal error", event_name="web.internal_error", id=id, path=path, exc_info=error)
    detail = f"this is a bug of scriptdispatch; the server's log has it under {id}"
    return problem(500, "internal_error", detail, id=id)
