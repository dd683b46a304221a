"""`/tokens`: made, listed and revoked by an admin."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch.services import views
from scriptdispatch.services.bodies import TokenBody
from scriptdispatch.services.fields import parse_time
from scriptdispatch.web.exchange import answer, read_body
from scriptdispatch.web.parts import Web, Who
from scriptdispatch.web.routes import Route


async def create_token(request: Request, web: Web) -> Response:
    """201 with `token`, the text to keep: it is shown this once."""
    body = await read_body(request, TokenBody)
    expires_at = parse_time(body.expires_at) if body.expires_at else None
    token, text = await web.tokens.create(body.name, body.scopes, expires_at)
    return answer({**views.token_view(token), "token": text}, 201)


async def list_tokens(web: Web) -> Response:
    return answer({"items": [views.token_view(token) for token in await web.tokens.list()]})


class RevokeQuery(BaseModel):
    cancel_tasks: bool = False


async def revoke_token(id: str, web: Web, who: Who, query: Annotated[RevokeQuery, Query()]) -> Response:
    """At once, everywhere. Tasks it created stay, unless `cancel_tasks`: then those that wait are canceled, and
    `tasks_canceled` says how many."""
    token = await web.tokens.revoke(id, alone=query.cancel_tasks)
    if not query.cancel_tasks:
        return answer(views.token_view(token))
    canceled = await web.tokens.cancel_tasks(token, web.actions.cancel, actor=who.name)
    return answer({**views.token_view(token), "tasks_canceled": canceled})


ROUTES = [
    Route(method="POST", path="/tokens", endpoint=create_token, scope="admin", body=TokenBody, status=201),
    Route(method="GET", path="/tokens", endpoint=list_tokens, scope="admin"),
    Route(method="DELETE", path="/tokens/{id}", endpoint=revoke_token, scope="admin", query=["cancel_tasks"]),
]
