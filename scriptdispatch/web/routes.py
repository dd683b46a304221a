"""How a route is declared: with its scope, or not at all. Deny by default.

Every route of the app is made here from a `Route`; `check` runs at start and refuses an app that has any other.
"""

from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from inspect import Parameter, signature
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch.services.bodies import Body
from scriptdispatch.services.fields import all_invalid
from scriptdispatch.web.parts import Parts, Web, Who

API = "/api/v1"
OPEN = "open"  # no token is asked for: health and readiness only


class Route(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    endpoint: Callable[..., Any]
    scope: str  # one of tokens.SCOPES, "any" (every valid token), or OPEN
    query: Sequence[str] = ()  # parameters it knows; others are 422
    body: type[Body] | None = None  # for the documentation; the endpoint reads it
    status: int = 200
    limited: bool = True  # counts for the rate limit
    documented: bool = True


class Guard:
    """Runs before anything else of the request is looked at."""

    def __init__(self, route: Route) -> None:
        self.route = route

    async def __call__(self, request: Request) -> None:
        parts: Parts = request.app.state.parts
        if self.route.scope != OPEN:
            request.state.who = await parts.gate.admit(request, self.route.scope, limited=self.route.limited)
        unknown = [name for name in request.query_params if name not in self.route.query]
        if unknown:
            raise all_invalid([(name[:100], "no such parameter in this version") for name in unknown])


class Direct(APIRoute):
    """An endpoint that wants no more than the request, our parts, the caller and texts of the path is called without
    FastAPI's general way of finding out what to give it."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        endpoint: Callable[..., Any] = self.endpoint
        guard = next(found.dependency for found in self.dependencies if isinstance(found.dependency, Guard))
        given = [_giver(parameter, self.param_convertors) for parameter in signature(endpoint).parameters.values()]
        givers = [giver for giver in given if giver is not None]
        if len(givers) < len(given):
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            await guard(request)
            response: Response = await endpoint(*(giver(request) for giver in givers))
            return response

        return handle


def _giver(parameter: Parameter, in_path: Container[str]) -> Callable[[Request], Any] | None:
    if parameter.annotation is Request:
        return lambda request: request
    if parameter.annotation is Web:
        return lambda request: request.app.state.parts
    if parameter.annotation is Who:
        return lambda request: request.state.who
    if parameter.annotation is str and parameter.name in in_path:
        return lambda request: request.path_params[parameter.name]
    return None


def register(app: FastAPI, routes: Iterable[Route], prefix: str = "") -> None:
    app.router.route_class = Direct
    for route in routes:
        app.add_api_route(
            prefix + route.path,
            route.endpoint,
            methods=[route.method],
            dependencies=[Depends(Guard(route))],
            status_code=route.status,
            response_class=Response,
            response_model=None,
            include_in_schema=route.documented,
            openapi_extra=_extra(route),
        )


def _extra(route: Route) -> dict[str, Any]:
    extra: dict[str, Any] = {"x-scope": route.scope}
    if route.scope != OPEN:
        extra["security"] = [{"token": []}]
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return extra


def guards(app: FastAPI) -> list[tuple[Any, Guard | None]]:
    """Every route of the app with its guard, None where it has none."""
    found = []
    for route in app.routes:
        calls = [dependency.call for dependency in getattr(getattr(route, "dependant", None), "dependencies", ())]
        found.append((route, next((call for call in calls if isinstance(call, Guard)), None)))
    return found


def check(app: FastAPI) -> None:
    """A route that nobody guards fails the start."""
    for route, guard in guards(app):
        if guard is None:
            raise RuntimeError(f"route {getattr(route, 'path', route)!r} declares no scope: register it as a Route")
