"""What the routes work with: the services of this web process, made once by `create_app`."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from scriptdispatch.central.client import CentralControl
from scriptdispatch.services.actions import Actions
from scriptdispatch.services.create import Creator
from scriptdispatch.services.idempotency import Idempotency
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.services.scripts import Scripts
from scriptdispatch.services.stats import StatsDesk
from scriptdispatch.services.tokens import Principal, TokenBook
from scriptdispatch.settings import Settings
from scriptdispatch.web.auth import Gate
from scriptdispatch.web.hub import Hub
from scriptdispatch.wiring import Backends


@dataclass(slots=True)
class Parts:
    settings: Settings
    backends: Backends
    central: CentralControl
    scripts: Scripts
    creator: Creator
    idempotency: Idempotency
    actions: Actions
    reconciler: Reconciler
    stats: StatsDesk
    tokens: TokenBook
    gate: Gate
    hub: Hub


async def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


async def _who(request: Request) -> Principal:
    who: Principal = request.state.who  # set by the route's guard, which runs first
    return who


Web = Annotated[Parts, Depends(_parts)]
Who = Annotated[Principal, Depends(_who)]
