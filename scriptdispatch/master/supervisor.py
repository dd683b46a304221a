"""The master process of a node: signal handlers and children only put events into its inbox, and its loop does one named
step after another. Order of start and stop is written here, top to bottom.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from scriptdispatch import __version__, crashpoints, ids, logs, processes, wire
from scriptdispatch.domain.lifecycle import POISON_LIMIT
from scriptdispatch.domain.model import Breaker, NodeRecord
from scriptdispatch.errors import Unavailable
from scriptdispatch.master.children import Child
from scriptdispatch.master.crew import Crew
from scriptdispatch.master.dispatcher import Dispatcher
from scriptdispatch.master.duties import Duties
from scriptdispatch.master.leader import Leadership
from scriptdispatch.master.recovery import Rescuer
from scriptdispatch.master.timers import Timers
from scriptdispatch.metrics import Metrics, add
from scriptdispatch.queue.port import Leased
from scriptdispatch.services.closing import Closing
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends, connect

PROBE_EVERY = timedelta(seconds=5)
RECONCILE_S = crashpoints.grace_s(30.0)
CLEAN_UP_S = 60.0
KILL_MARGIN_S = 5.0
TAKE_OVER = 200  # executions in one message
log = logs.get("master")


def run_node(settings: Settings, *, ready: Callable[[], None] | None = None, lifeline_fd: int | None = None) -> int:
    """Runs a node until it is told to stop. Answers the exit code. `lifeline_fd`: when its other end closes, stop."""
    import uvloop

    processes.begin(f"master {settings.node_name}")
    logs.configure(settings.log_level, settings.log_format, process="master")
    return uvloop.run(_run(settings, ready, lifeline_fd))


async def _run(settings: Settings, ready: Callable[[], None] | None, lifeline_fd: int | None) -> int:
    backends = await connect(settings)
    try:
        return await Node(settings, backends).run(ready, lifeline_fd)
    finally:
        await backends.close()


class Node:
    def __init__(self, settings: Settings, backends: Backends) -> None:
        self.id = ids.new_id()
        self._settings, self._backends, self._clock = settings, backends, backends.clock
        self._started_at = self._clock.now()
        self._inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._metrics = Metrics()
        closing = Closing(backends, settings, role="master", metrics=self._metrics)
        self._crew = Crew(settings, self._clock, self.id, self._on_message, self._on_death)
        self._rescuer = Rescuer(backends, closing, self._take_over if settings.central_deduplicates else None)
        self._dispatcher = Dispatcher(backends.queue, settings, self.id, self._crew.serving, POISON_LIMIT, self._on_poison)
        self._leadership = Leadership(backends.leases, backends.events, self._clock, self.id, settings.lease_ttl)
        reconciler = Reconciler(backends, settings, closing)
        self._duties = Duties(backends, settings, self._leadership, reconciler, self._rescuer, self._ask_cancel)
        self._timers = Timers(self._clock, self._leadership, self._metrics)
        self._breaker = Breaker()
        self._dead: list[tuple[Child, list[Leased]]] = []  # to be rescued; kept until it is done
        self._poison: list[Leased] = []
        self._to_take_over: list[str] = []  # M3, until a worker is there to do it
        self._background: set[asyncio.Task[None]] = set()
        self._giving: asyncio.Task[None] | None = None
        self._naming: asyncio.Task[None] | None = None
        self._stopping = False
        self._hurry = asyncio.Event()
        self._ready_told = False

    # ---------------------------------------------------------------------------------------------------------- the loop

    async def run(self, ready: Callable[[], None] | None, lifeline_fd: int | None) -> int:
        self._hear_signals(lifeline_fd)
        await self._bury_predecessor()
        await self._beat()
        await self._populate()
        self._start_timers()
        listening = asyncio.create_task(self._listen())
        while not self._stopping:
            kind, what = await self._inbox.get()
            await self._step(kind, what)
            if self._crew.complete() and not self._ready_told:
                self._ready_told = True
                log.info("node is ready", event_name="node.ready", node_id=self.id, workers=self._crew.want["worker"])
                if ready is not None:
                    ready()
        await self._shut_down(listening)
        return 0

    async def _listen(self) -> None:
        """A bug in it must not leave a node that lives and takes no tasks."""
        while not self._stopping:
            try:
                await self._dispatcher.listen()
            except Exception:
                log.exception("a bug in the dispatcher", event_name="dispatcher.bug")
                await asyncio.sleep(1)

    async def _step(self, kind: str, what: Any) -> None:
        if kind == "signal":
            await self._on_signal(what)
        elif kind == "died":
            await self._after_death(what)
        elif kind == "ready":
            self._after_ready(what)
        elif kind == "populate":
            await self._populate()

    def _post(self, kind: str, what: Any = None) -> None:
        self._inbox.put_nowait((kind, what))

    def _start_timers(self) -> None:
        settings, duties = self._settings, self._duties
        self._timers.every(settings.heartbeat_interval, "heartbeat", self._beat)
        self._timers.every(settings.heartbeat_interval, "children", self._watch)
        self._timers.every(settings.check_interval, "check", self._check)
        self._timers.every(settings.check_interval, "leader_check", duties.check, leader_only=True)
        self._timers.every(settings.load_interval, "load", duties.load, leader_only=True)
        self._timers.every(settings.timeout_interval, "timeout", duties.full_check, leader_only=True)
        self._timers.every(RECONCILE_S, "reconcile", duties.reconcile, leader_only=True)
        self._timers.every(CLEAN_UP_S, "clean_up", duties.clean_up, leader_only=True)
        self._timers.start()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ----------------------------------------------------------------------------------------------------------- signals

    def _hear_signals(self, lifeline_fd: int | None) -> None:
        loop = asyncio.get_running_loop()
        for name in ("TERM", "INT", "HUP", "TTIN", "TTOU"):
            loop.add_signal_handler(getattr(signal, f"SIG{name}"), self._post_signal, name)
        if lifeline_fd is not None:
            loop.add_reader(lifeline_fd, self._lifeline_cut, lifeline_fd)

    def _post_signal(self, name: str) -> None:
        """Only queues; but a second TERM or INT must be heard while the loop already waits for the drain."""
        if name in ("TERM", "INT") and self._stopping:
            self._hurry.set()
        self._post("signal", name)

    def _lifeline_cut(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._post_signal("TERM")

    async def _on_signal(self, name: str) -> None:
        log.info("signal", event_name="signal", signal=name)
        if name in ("TERM", "INT"):
            self._stopping = True
        elif name == "HUP":
            self._spawn(self._crew.replace_workers())
        elif name == "TTIN":
            self._crew.want["worker"] += 1
            await self._populate()
        elif name == "TTOU":
            self._crew.want["worker"] = max(1, self._crew.want["worker"] - 1)
            await self._populate()

    # ---------------------------------------------------------------------------------------------------------- children

    def _on_message(self, child: Child, message: Any) -> None:
        if isinstance(message, wire.Done):
            self._dispatcher.done(child, message)
            self._give_up()
        elif isinstance(message, wire.Ready):
            self._post("ready", child)
        elif isinstance(message, wire.CentralSeen):
            self._spawn(self._on_central(message))

    def _on_death(self, child: Child) -> None:
        self._post("died", child)

    def _after_ready(self, child: Child) -> None:
        self._crew.settled(child.kind)
        if child.kind == "worker":
            if self._breaker.open:
                child.send(wire.BreakerIs(open=True))
            self._dispatcher.check()
            self._dispatcher.wake()
            self._name_children()
            self._announce("worker.up", child)

    async def _after_death(self, child: Child) -> None:
        how = "asked to" if child.stopping else f"exit code {child.exit_code}"
        say = log.info if child.exit_code == 0 else log.warning
        say("child ended", event_name="child.ended", child=child.kind, id=child.id, how=how)
        self._crew.bury(child)
        if child.kind == "worker":
            self._announce("worker.down", child)
            self._dead.append((child, self._dispatcher.lost(child)))
            self._spawn(self._rescue())
            self._spawn(self._remember(child))
        if not self._stopping:
            await self._populate()

    async def _rescue(self) -> None:
        """M for dead workers. Kept until it is done: also the check comes here again."""
        waiting, self._dead = self._dead, []
        for child, items in waiting:
            try:
                await self._rescuer.worker_died(child.id, items, f"worker {child.name} died (exit code {child.exit_code})")
            except Unavailable as error:
                log.warning("recovery put off", event_name="recovery.put_off", reason=str(error))
                self._dead.append((child, items))
        self._dispatcher.wake()

    async def _remember(self, child: Child) -> None:
        try:
            await self._backends.leases.workers_gone([child.record("offline")])
        except Unavailable as error:
            log.info("not noted", reason=str(error))

    def _on_poison(self, item: Leased) -> None:
        self._poison.append(item)
        self._spawn(self._end_poison())

    async def _end_poison(self) -> None:
        waiting, self._poison = self._poison, []
        for item in waiting:
            try:
                await self._rescuer.poison(item)
            except Unavailable as error:
                log.warning("poison task put off", task_id=item.task_id, reason=str(error))
                self._poison.append(item)

    def _announce(self, event: str, child: Child) -> None:
        at = format_time(self._clock.now())
        self._spawn(
            self._backends.events.publish(
                [{"event": event, "worker_id": child.id, "name": child.name, "node_id": self.id, "at": at}]
            )
        )

    def _give_up(self) -> None:
        """Tell the queue what was reported; one such call at a time, so that reports pile up into batches."""
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._dispatcher.give_up())

    def _ask_cancel(self, executions: Any) -> None:
        """T4, U3: the master never talks to central control; a worker asks."""
        workers = self._crew.serving()
        if workers and executions:
            workers[0].send(wire.AskCancel(executions=list(executions)))

    def _take_over(self, execution_ids: Sequence[str]) -> None:
        """M3: one worker posts them again."""
        self._to_take_over += execution_ids
        workers = self._crew.serving()
        if workers and self._to_take_over:
            workers[0].send(wire.TakeOver(execution_ids=self._to_take_over[:TAKE_OVER]))
            del self._to_take_over[:TAKE_OVER]

    # ------------------------------------------------------------------------------------------------ central control

    async def _on_central(self, seen: wire.CentralSeen) -> None:
        now = self._clock.now()
        if seen.well:
            await self._set_breaker(Breaker())
        else:
            since = self._breaker.since or now
            await self._set_breaker(Breaker(open=True, since=since, reason=seen.reason, probe_at=now + PROBE_EVERY))

    async def _set_breaker(self, breaker: Breaker) -> None:
        self._hear_breaker(breaker)
        try:
            await self._backends.leases.set_breaker(breaker)
        except Unavailable as error:
            log.warning("the other nodes were not told of the breaker", reason=str(error))

    def _hear_breaker(self, breaker: Breaker) -> None:
        if breaker.open != self._breaker.open:
            state = "opened" if breaker.open else "closed"
            log.warning(f"breaker {state}", event_name=f"breaker.{state}", reason=breaker.reason)
            for worker in self._crew.all("worker"):
                worker.send(wire.BreakerIs(open=breaker.open))
        self._breaker = breaker
        self._dispatcher.breaker_open = breaker.open
        if breaker.open:
            self._dispatcher.check()
            self._give_up()
        self._dispatcher.wake()

    async def _probe(self) -> None:
        """The leader asks, one probe every 5 s, by one of its workers."""
        now = self._clock.now()
        due = self._breaker.probe_at is None or now >= self._breaker.probe_at
        if not self._breaker.open or not due or self._leadership.term is None:
            return
        workers = self._crew.serving()
        if workers:
            workers[0].send(wire.Probe())

    # ------------------------------------------------------------------------------------------------- timers' duties

    async def _beat(self) -> None:
        """Every heartbeat: renew what this node holds, say that it lives."""
        await self._backends.queue.renew(self.id, self._settings.lease_ttl)
        leads_now = await self._leadership.renew()
        await self._say_who()
        self._hear_breaker(await self._backends.leases.breaker())
        await self._probe()
        if leads_now:
            self._spawn(self._take_office())

    async def _say_who(self) -> None:
        """Whoever buries this node looks for the rows of the workers that it named: only those are given tasks."""
        new = [child for child in self._crew.all() if not child.named]
        await self._backends.leases.beat(self._record(), self._settings.lease_ttl)
        for child in new:
            child.named = True
        if new:
            self._dispatcher.check()
        self._dispatcher.wake()

    def _name_children(self) -> None:
        """At once, not only with the next heartbeat. One such call at a time: the store may be slow to answer."""
        if self._naming is None or self._naming.done():
            self._naming = asyncio.create_task(self._say_who_now())

    async def _say_who_now(self) -> None:
        try:
            await self._say_who()
        except Unavailable as error:
            log.info("named with the next heartbeat", reason=str(error))

    async def _watch(self) -> None:
        """Looks after the children. Waits for nothing: one of them may be what holds up everybody's writes."""
        self._crew.check()
        if self._crew.problems:
            self._post("populate")

    async def _populate(self) -> None:
        await self._crew.populate()
        if not all(child.named for child in self._crew.all()):
            self._name_children()

    async def _take_office(self) -> None:
        await self._timers.carry_out("take_office", self._duties.take_office)

    async def _check(self) -> None:
        """The safety net of the pace."""
        self._post("populate")
        self._dispatcher.check()
        self._give_up()
        if self._dead:
            await self._rescue()
        if self._poison:
            await self._end_poison()
        self._take_over(())

    def _record(self) -> NodeRecord:
        consumers = [child for child in self._crew.all("consumer") if child.ready]
        lags = [child.last_beat.lag for child in consumers if child.last_beat.lag is not None]
        return NodeRecord(
            id=self.id,
            name=self._settings.node_name,
            pid=os.getpid(),
            version=__version__,
            started_at=self._started_at,
            last_heartbeat_at=self._clock.now(),
            workers=self._crew.records(),
            consumers=len(consumers),
            consumer_lag=max(lags) if lags else None,
            problems=list(self._crew.problems.values()),
            metrics=add(self._crew.metrics(), self._metrics.snapshot()),
        )

    async def _bury_predecessor(self) -> None:
        """A master of this node that was killed: its process is gone, so nothing has to wait for its lease. Only where
        store and processes are on one machine can that be known."""
        if not self._settings.store_url.startswith("sqlite"):
            return
        for node, _ in await self._backends.leases.nodes():
            if node.name == self._settings.node_name and not _lives(node.pid):
                await self._duties.bury(node)
                await self._backends.queue.renew(node.id, 0)
                await self._backends.leases.resign(node.id)
                await self._backends.leases.beat(node, 0)  # nobody takes it for alive until its lease would have ended
        await self._backends.queue.reclaim()

    # ------------------------------------------------------------------------------------------------------------ the end

    async def _shut_down(self, listening: "asyncio.Task[None]") -> None:
        """Quiet, drain, hand back, kill."""
        grace_s = self._settings.shutdown_grace
        log.info("stopping", event_name="node.stopping", grace_s=grace_s, in_hand=self._dispatcher.in_hand())
        self._dispatcher.stopping = True
        listening.cancel()
        self._crew.want.clear()
        for worker in self._crew.all("worker"):
            worker.stop(grace_s)
        await self._until_gone("worker", grace_s)
        for consumer in self._crew.all("consumer"):
            consumer.stop(min(grace_s, KILL_MARGIN_S))
        await self._until_gone("consumer", KILL_MARGIN_S)
        self._timers.stop()
        await self._hand_back()
        log.info("stopped", event_name="node.stopped")

    async def _until_gone(self, kind: Any, grace_s: float) -> None:
        """Goes on burying and rescuing while it waits. A second signal shortens the wait; then they are killed."""
        deadline = self._clock.uptime() + grace_s + KILL_MARGIN_S
        hurried = killed = False
        while self._crew.all(kind):
            if self._hurry.is_set() and not hurried:
                hurried = True
                deadline = min(deadline, self._clock.uptime() + KILL_MARGIN_S)
                for child in self._crew.all(kind):
                    child.stop(KILL_MARGIN_S - 2)
            if self._clock.uptime() > deadline and not killed:
                killed = True
                for child in self._crew.all(kind):
                    child.kill("did not end in time")
            try:
                what, child = await asyncio.wait_for(self._inbox.get(), 0.2)
            except TimeoutError:
                continue
            if what == "died":
                await self._after_death(child)

    async def _hand_back(self) -> None:
        """What is still ours goes back at once, instead of waiting for the lease to run out."""
        try:
            self._dispatcher.check()
            if self._giving is not None:
                await self._giving
            if self._naming is not None:
                await self._naming  # or it would call a node alive that has said goodbye
            await self._dispatcher.give_up()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._rescue()
            await self._backends.queue.renew(self.id, 0)
            await self._backends.queue.reclaim()
            await self._leadership.resign()
            await self._backends.leases.beat(self._record(), 0)
        except Unavailable as error:
            log.warning("not handed back; the leases run out by themselves", reason=str(error))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
