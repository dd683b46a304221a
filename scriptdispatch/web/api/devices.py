"""`/devices`: who holds them, who waits, and the forced release."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from scriptdispatch.services.bodies import ActionBody
from scriptdispatch.services.devices import State, device_page, device_view
from scriptdispatch.services.fields import invalid
from scriptdispatch.web.exchange import answer, checked
from scriptdispatch.web.parts import Web, Who
from scriptdispatch.web.routes import Route

LARGEST = 2**63 - 1


class DeviceQuery(BaseModel):
    state: State | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=200)


class UnlockQuery(BaseModel):
    reason: str = Field(min_length=1, max_length=1000, description="required: it goes into the history")
    fencing_token: int | None = Field(None, ge=0, le=LARGEST)


async def list_devices(web: Web, query: Annotated[DeviceQuery, Query()]) -> Response:
    """Devices with a lock or a lane, by id."""
    return answer(await device_page(web.backends, query.state, query.cursor, query.limit))


async def get_device(device_id: str, web: Web) -> Response:
    """One device: what central control says, its lock, its lane."""
    return answer(await device_view(web.backends, web.central, device_id))


async def unlock_device(device_id: str, web: Web, who: Who, query: Annotated[UnlockQuery, Query()]) -> Response:
    """Forced release: its execution and task fail with LOCK_RELEASED. The script may still run."""
    if not query.reason.strip():
        raise invalid("reason", "is required")
    reason = checked({"reason": query.reason}, ActionBody).reason
    return answer(await web.actions.unlock(device_id, actor=who.name, reason=reason, fencing_token=query.fencing_token))


ROUTES = [
    Route(method="GET", path="/devices", endpoint=list_devices, scope="device:read", query=[*DeviceQuery.model_fields]),
    Route(method="DELETE", path="/devices/{device_id:path}/lock", endpoint=unlock_device, scope="lock:force",
          query=[*UnlockQuery.model_fields]),
    Route(method="GET", path="/devices/{device_id:path}", endpoint=get_device, scope="device:read"),
]  # fmt: skip
