"""`/healthz`, `/readyz` and `/metrics`: outside `/api/v1`."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import PlainTextResponse, Response

from scriptdispatch.errors import Unavailable
from scriptdispatch.web.metrics import CONTENT_TYPE, exposition
from scriptdispatch.web.parts import Parts, Web
from scriptdispatch.web.routes import OPEN, Route

WITHIN_S = 2.0
Check = Callable[[Parts], Awaitable[str]]


async def healthz() -> Response:
    """The process lives."""
    return PlainTextResponse("ok\n")


async def readyz(web: Web) -> Response:
    """200 if store and queue answer, else 503; the others are shown. One line each."""
    answers = await asyncio.gather(*(_checked(web, check) for _, check in CHECKS))
    lines = [
        f"{name} {'ok' if well else 'failed'} {text}\n" for (name, _), (well, text) in zip(CHECKS, answers, strict=True)
    ]
    needed = [well for (name, _), (well, _) in zip(CHECKS, answers, strict=True) if name in ("store", "queue")]
    return PlainTextResponse("".join(lines), 200 if all(needed) else 503)


async def _checked(web: Parts, check: Check) -> tuple[bool, str]:
    try:
        async with asyncio.timeout(WITHIN_S):
            return True, await check(web)
    except TimeoutError:
        return False, f"no answer within {WITHIN_S:.0f} s"
    except (Unavailable, NotWell) as error:
        return False, " ".join(str(error).split())


class NotWell(Exception):
    """It answers, and says that something is wrong."""


async def _store(web: Parts) -> str:
    return await web.backends.store.ping()


async def _queue(web: Parts) -> str:
    return await web.backends.queue.ping()


async def _mq(web: Parts) -> str:
    return await web.backends.stream.ping()


async def _central(web: Parts) -> str:
    if web.settings.central_url is None:
        raise NotWell("central_url is not set")
    breaker = await web.backends.leases.breaker()
    if breaker.open:
        raise NotWell(f"breaker open: {breaker.reason or 'unknown'}")
    return "breaker closed"


async def _leader(web: Parts) -> str:
    leader, nodes = await asyncio.gather(web.backends.leases.leader(), web.backends.leases.nodes())
    if leader is None:
        raise NotWell("no node leads: start one with `scriptdispatch serve`")
    name = next((node.name for node, _ in nodes if node.id == leader[0]), leader[0])
    return f"{name} term {leader[1]}"


async def _workers(web: Parts) -> str:
    nodes = [node for node, alive in await web.backends.leases.nodes() if alive]
    problems = [problem for node in nodes for problem in node.problems]
    if problems:
        raise NotWell("; ".join(problems))
    ready = sum(worker.status == "ready" for node in nodes for worker in node.workers)
    if not ready:
        raise NotWell("none ready")
    return f"{ready} ready"


CHECKS: list[tuple[str, Check]] = [
    ("store", _store),
    ("queue", _queue),
    ("mq", _mq),
    ("central", _central),
    ("leader", _leader),
    ("workers", _workers),
]


async def metrics(web: Web) -> Response:
    """For Prometheus."""
    return Response(await exposition(web.backends, web.actions.metrics.snapshot()), media_type=CONTENT_TYPE)


ROUTES = [
    Route(method="GET", path="/healthz", endpoint=healthz, scope=OPEN, documented=False),
    Route(method="GET", path="/readyz", endpoint=readyz, scope=OPEN, documented=False),
    Route(method="GET", path="/metrics", endpoint=metrics, scope="task:read", limited=False, documented=False),
]
