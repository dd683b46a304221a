"""`/tokens`: made, listed and revoked by an admin."""

from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch.services import views
from scriptdispatch.services.bodies import TokenBody
from scriptdispatch.services.fields import parse_time
from scriptdispatch.web.exchange import answer, read_body
from scriptdispatch.web.parts import Web
from scriptdispatch.web.routes import Route


async def create_token(request: Request, web: Web) -> Response:
    """201 with `token`, the text to keep: it is shown this once."""
    body = await read_body(request, TokenBody)
    expires_at = parse_time(body.expires_at) if body.expires_at else None
    token, text = await web.tokens.create(body.name, body.scopes, expires_at)
    return answer({**views.token_view(token), "token": text}, 201)


async def list_tokens(web: Web) -> Response:
    return answer({"items": [views.token_view(token) for token in await web.tokens.list()]})


async def revoke_token(id: str, web: Web) -> Response:
    """At once, everywhere. Tasks it created stay."""
    return answer(views.token_view(await web.tokens.revoke(id)))


ROUTES = [
    Route(method="POST", path="/tokens", endpoint=create_token, scope="admin", body=TokenBody, status=201),
    Route(method="GET", path="/tokens", endpoint=list_tokens, scope="admin"),
    Route(method="DELETE", path="/tokens/{id}", endpoint=revoke_token, scope="admin"),
]
