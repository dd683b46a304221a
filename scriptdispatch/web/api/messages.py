"""`/execution-logs` for a central control that speaks HTTP, and the quarantine."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch.services import ingest, views
from scriptdispatch.services.bodies import MessagesBody
from scriptdispatch.web.exchange import answer, read_body
from scriptdispatch.web.parts import Web
from scriptdispatch.web.routes import Route


async def post_messages(request: Request, web: Web) -> Response:
    """202 once the accepted ones are durable in the stream."""
    body = await read_body(request, MessagesBody)
    return answer(await ingest.publish_messages(web.backends.stream, body.messages), 202)


class QuarantineQuery(BaseModel):
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=200)


async def list_quarantine(web: Web, query: Annotated[QuarantineQuery, Query()]) -> Response:
    """Messages that could not be used, with the reason, newest first."""
    items, cursor = await ingest.quarantine_page(web.backends, query.cursor, query.limit)
    return answer({"items": [views.quarantine_view(item) for item in items], "next_cursor": cursor})


async def get_quarantined(id: str, web: Web) -> Response:
    return answer(views.quarantine_view(await ingest.quarantined(web.backends, id)))


async def replay(id: str, web: Web) -> Response:
    """Back into the stream, to be judged again."""
    return answer(views.quarantine_view(await ingest.replay(web.backends, id)))


async def drop(id: str, web: Web) -> Response:
    await ingest.drop(web.backends, id)
    return Response(status_code=204)


ROUTES = [
    # Not limited: messages come in as fast as devices speak, and what is refused here would only come again.
    Route(method="POST", path="/execution-logs", endpoint=post_messages, scope="log:write", body=MessagesBody,
          status=202, limited=False),
    Route(method="GET", path="/quarantine", endpoint=list_quarantine, scope="admin",
          query=[*QuarantineQuery.model_fields]),
    Route(method="GET", path="/quarantine/{id}", endpoint=get_quarantined, scope="admin"),
    Route(method="POST", path="/quarantine/{id}/replay", endpoint=replay, scope="admin"),
    Route(method="DELETE", path="/quarantine/{id}", endpoint=drop, scope="admin", status=204),
]  # fmt: skip
