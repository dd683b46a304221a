"""A worker process: carries out what its master assigns, up to its capacity at a time, and reports each item (W8)."""

import asyncio
import socket
from typing import Any

import msgspec

from scriptdispatch import child, crashpoints, logs, wire
from scriptdispatch.central.breaker import Breaker
from scriptdispatch.central.client import CentralControl
from scriptdispatch.domain import lifecycle
from scriptdispatch.errors import CentralUnavailable, Unavailable
from scriptdispatch.metrics import Metrics
from scriptdispatch.queue.port import Leased
from scriptdispatch.services.closing import Closing
from scriptdispatch.settings import Settings
from scriptdispatch.worker.runner import Runner, Verdict

PAUSE_S = 1.0
log = logs.get("worker")


def main(sock: socket.socket, settings: Settings, worker_id: str, node_id: str) -> None:
    """Runs in another process."""
    child.run(sock, settings, "worker", worker_id, node_id, Worker)


class Worker:
    def __init__(self, context: child.Context) -> None:
        self._pipe, self._backends = context.pipe, context.backends
        self._metrics = Metrics()
        self._breaker = Breaker()
        self._told_open = False
        self._central = CentralControl(
            context.settings, context.backends.clock, limit=max(16, context.settings.worker_capacity)
        )
        closing = Closing(context.backends, context.settings, role="worker", metrics=self._metrics)
        self._runner = Runner(
            context.backends, context.settings, self._central, self._breaker, closing, context.id, context.node_id
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()
        self._report: list[tuple[Leased, Verdict]] = []

    async def start(self) -> None:
        return

    def beat(self) -> wire.Beat:
        return wire.Beat(load=len(self._tasks), metrics=self._metrics.snapshot())

    async def handle(self, message: Any) -> None:
        if isinstance(message, wire.Assign):
            for item in message.items:
                self._begin(self._carry_out(item), self._tasks)
        elif isinstance(message, wire.BreakerIs):
            self._hear_breaker(message)
        elif isinstance(message, wire.Probe):
            self._begin(self._probe(), self._others)
        elif isinstance(message, wire.AskCancel):
            self._begin(self._ask_cancel(message.executions), self._others)

        elif isinstance(message, wire.TakeOver):
            for execution_id in message.execution_ids:
                self._begin(self._take_over(execution_id), self._others)

    async def _take_over(self, execution_id: str) -> None:
        try:
            await self._runner.take_over(execution_id)
        except Unavailable as error:
            log.info("not taken over; result or deadline decide", execution_id=execution_id, reason=str(error))

    async def stop(self, grace_s: float, hurry: bool) -> None:
        """Lets what is in hand finish; in a hurry, and near the end of the grace, what is not stamped is undone."""
        self._runner.hurry = self._runner.hurry or hurry
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, grace_s - 2))
        self._runner.hurry = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        if self._tasks:
            log.warning("ends with tasks in hand; recovery takes them", tasks=len(self._tasks))
        self._flush()
        await self._central.close()

    def _begin(self, work: Any, group: "set[asyncio.Task[None]]") -> None:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)

    async def _carry_out(self, item: Leased) -> None:
        try:
            verdict = await self._runner.carry_out(item)
        except Exception:
            log.exception("a bug in the worker", event_name="worker.bug", task_id=item.task_id)
            verdict = Verdict.WAIT
        if crashpoints.planned("worker.in_message"):  # far more than a pipe holds: the rest of it is still to be sent
            self._pipe.send(wire.Beat(metrics={"test": "x" * 5_000_000}))
            crashpoints.reach_now("worker.in_message", item.task_id)
        self._tell_breaker()
        if not self._report:
            asyncio.get_running_loop().call_soon(self._flush)
        self._report.append((msgspec.structs.replace(item, told=None), verdict))

    def _flush(self) -> None:
        """W8: one notice for all that ended in this turn of the loop."""
        if not self._report:
            return
        finished = [item for item, verdict in self._report if verdict is Verdict.FINISHED]
        given_back = [item for item, verdict in self._report if verdict is not Verdict.FINISHED]
        away = any(verdict is Verdict.WAIT for _, verdict in self._report)
        self._report.clear()
        self._pipe.send(wire.Done(finished=finished, given_back=given_back, pause_s=PAUSE_S if away else 0))

    # --- central control

    def _tell_breaker(self) -> None:
        if self._breaker.open and not self._told_open:
            self._told_open = True
            self._pipe.send(wire.CentralSeen(well=False, reason=self._breaker.reason))

    def _hear_breaker(self, message: wire.BreakerIs) -> None:
        if not message.open:
            self._breaker.close()
            self._told_open = False
        elif not self._breaker.open:
            self._breaker.reason = "opened for the cluster"
            self._told_open = True

    async def _probe(self) -> None:
        try:
            await self._central.probe()
        except CentralUnavailable as error:
            self._pipe.send(wire.CentralSeen(well=False, reason=str(error)))
        else:
            self._pipe.send(wire.CentralSeen(well=True))

    async def _ask_cancel(self, executions: list[tuple[str, str]]) -> None:
        """T4, U3: best effort; whoever asked asks again. While a push is under way "never had it" is no answer yet."""
        for execution_id, task_id in executions:
            try:
                [row] = await self._backends.store.executions([execution_id])
                too_early = row is not None and lifecycle.being_pushed(row, self._backends.clock.now())
                answer = await self._central.cancel(execution_id)
                if answer == "never_had" and too_early:
                    continue
                change = lifecycle.cancel_answered(task_id, execution_id, answer, self._backends.clock.now())
                await self._backends.store.commit([change])
            except Unavailable as error:
                log.info("cancel not delivered", execution_id=execution_id, reason=str(error))
