"""The lab's outbox says what to do when the product does not let it in."""

from typing import Any

import pytest

from scriptdispatch.central import lab_outbox
from scriptdispatch.central.http import Response
from scriptdispatch.central.lab_outbox import HttpCarrier, Parcel


class Door:
    """A product that answers with these, one after the other."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses)

    async def checkout(self) -> "Door":
        return self

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    async def request(self, *_: Any, **__: Any) -> Response:
        return Response(status=self._statuses.pop(0), headers={}, body=b"{}")


async def test_a_lab_without_a_valid_token_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles: list[str] = []

    async def pause(_: Any, trouble: str) -> None:
        troubles.append(trouble)

    monkeypatch.setattr(lab_outbox.Patience, "pause", pause)
    carrier = HttpCarrier("http://127.0.0.1:1", None)
    await carrier.close()
    monkeypatch.setattr(carrier, "_pool", Door(401, 503, 202))
    assert await carrier.deliver([Parcel(body=b"{}")]) == 0
    assert troubles[0].startswith("HTTP 401: set SCRIPTDISPATCH_TOKEN")
    assert troubles[1] == "HTTP 503"
