"""`/docs` and `/openapi.json`, working offline: the page's script and style come from the `fastapi-swagger` package."""

from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from scriptdispatch.services.bodies import ActionBody, BatchBody, MessagesBody, TaskBody, TokenBody
from scriptdispatch.web.exchange import answer
from scriptdispatch.web.routes import Route

BODIES = (TaskBody, BatchBody, ActionBody, MessagesBody, TokenBody)
FILES = {
    "swagger-ui-bundle.js": "application/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


def add_schemas(app: FastAPI) -> None:
    """Bodies are read by the routes themselves, so their schemas are added here."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        parts = schema.setdefault("components", {})
        if "securitySchemes" not in parts:
            _, found = models_json_schema(
                [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
            )
            parts.setdefault("schemas", {}).update(found.get("$defs", {}))
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": "sd_<id>_<secret>"}}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def page(request: Request) -> Response:
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="scriptdispatch",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon-32x32.png",
        swagger_ui_parameters={"tryItOutEnabled": True, "persistAuthorization": True},
    )


async def root() -> Response:
    """Until there is a console, whoever opens the address finds the documentation."""
    return RedirectResponse("/docs", 307)


async def schema(request: Request) -> Response:
    return answer(request.app.openapi())


def _file(name: str, kind: str) -> Route:
    async def send() -> Response:
        content = (resources.files("fastapi_swagger.resources") / name).read_bytes()
        return Response(content, media_type=kind, headers={"Cache-Control": "max-age=3600"})

    return Route(method="GET", path=f"/docs/{name}", endpoint=send, scope="any", documented=False)


ROUTES = [
    Route(method="GET", path="/", endpoint=root, scope="any", documented=False),
    Route(method="GET", path="/docs", endpoint=page, scope="any", documented=False),
    Route(method="GET", path="/openapi.json", endpoint=schema, scope="any", documented=False),
    *(_file(name, kind) for name, kind in FILES.items()),
]
