"""What the leader does for the whole cluster, in named steps. Each may be repeated by the next leader at any time."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from scriptdispatch import logs
from scriptdispatch.domain.model import NodeRecord
from scriptdispatch.errors import StaleTerm
from scriptdispatch.master.leader import Leadership
from scriptdispatch.master.recovery import Rescuer
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends

PURGE = 500
NODE_MEMORY = timedelta(minutes=10)  # how long after its death a node's rows are looked for, again and again
log = logs.get("duties")
AskCancel = Callable[[Sequence[tuple[str, str]]], None]


class Duties:
    """`ask_cancel` hands (execution, task) pairs to a worker, which asks central control."""

    def __init__(
        self,
        backends: Backends,
        settings: Settings,
        leadership: Leadership,
        reconciler: Reconciler,
        rescuer: Rescuer,
        ask_cancel: AskCancel,
    ) -> None:
        self._backends, self._settings, self._leadership = backends, settings, leadership
        self._reconciler, self._rescuer, self._ask_cancel = reconciler, rescuer, ask_cancel
        self._buried: set[str] = set()

    def _term(self) -> int:
        """For the writes of a duty. A lease may run out in the middle of one (this process was stopped, a server was slow):
        without a term they would pass unchecked."""
        if (term := self._leadership.term) is None:
            raise StaleTerm("the lease ran out in the middle of a duty")
        return term

    async def take_office(self) -> None:
        """Once when this node becomes the leader: everything that a crash may have left."""
        await self._reconciler.rebuild()
        await self.bury_nodes()
        await self._backends.queue.reclaim()
        await self._reconciler.settle_all(self._term())
        await self._reconciler.free_locks()
        await self._reconciler.restore_locks()
        await self.load()

    async def check(self) -> None:
        """Every few seconds: deadlines, dead nodes, tasks whose push to the queue was lost just now."""
        await self._reconciler.rebuild()
        await self.time_out()
        await self.bury_nodes()
        await self._backends.queue.reclaim()
        await self._reconciler.load_recent()

    async def time_out(self) -> None:
        """T1–T4."""
        closed = await self._reconciler.overdue(self._term())
        if closed:
            self._ask_cancel([(row.id, row.task_id) for row in closed])

    async def load(self) -> None:
        """The loader: what falls due before the load after next is queued with its time."""
        queued = await self._reconciler.load_ahead()
        if queued:
            log.info("loaded", event_name="tasks.loaded", tasks=queued)

    async def reconcile(self) -> None:
        """Every 30 s."""
        found = {
            "unsent": await self._reconciler.hand_back_unsent(self._term()),
            "unsettled": await self._reconciler.settle_recent(self._term()),
            "locks_freed": await self._reconciler.free_locks(),
            "locks_restored": await self._reconciler.restore_locks(),
            "entries_dropped": await self._reconciler.drop_entries(),
            "queued": await self._reconciler.load(self._backends.clock.now()),
        }
        await self._reconciler.reopen_lanes()
        unanswered = await self._reconciler.cancels_unanswered()
        if unanswered:
            self._ask_cancel([(task.execution_id, task.id) for task in unanswered if task.execution_id])
        if any(found.values()):
            log.warning("reconciled", event_name="reconciled", **found)

    async def full_check(self) -> None:
        """Every 10 min: the safety net over all of it."""
        await self.time_out()
        await self._reconciler.settle_all(self._term())

    async def clean_up(self) -> None:
        """Final tasks and log lines past their time, a bounded batch at a time."""
        now = self._backends.clock.now()
        if self._settings.retention_days:
            await self._backends.store.purge(now - timedelta(days=self._settings.retention_days), PURGE)
        if self._settings.log_retention_days:
            await self._backends.store.purge_logs(now - timedelta(days=self._settings.log_retention_days), PURGE)
        await self._backends.store.purge_remembered(now - timedelta(hours=24))

    async def bury_nodes(self) -> None:
        """M1, M2 for nodes without a heartbeat. Again for a while: a zombie may insert a row after the first time."""
        now = self._backends.clock.now()
        for node, alive in await self._backends.leases.nodes():
            recent = now - node.last_heartbeat_at < NODE_MEMORY
            if not alive and (recent or node.id not in self._buried):
                await self.bury(node, self._term())

    async def bury(self, node: NodeRecord, term: int | None = None) -> None:
        """Without a term: by a master that knows its predecessor to be dead."""
        why = f"node {node.name} died"
        count = await self._rescuer.workers_died([worker.id for worker in node.workers], why, term)
        if count and node.id not in self._buried:
            log.warning("executions of a dead node recovered", event_name="node.buried", node_id=node.id, executions=count)
        self._buried.add(node.id)
