"""The children of a node: as many workers and consumers as wanted, replaced when they die, slowly if they keep dying."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import WorkerRecord
from scriptdispatch.master.children import Child, Kind
from scriptdispatch.metrics import add
from scriptdispatch.settings import Settings

SHORT_LIFE_S = 10.0
FREE = 3  # so many short lives in a row are replaced at once: a task that kills its workers is out of the way by then
LONGEST_BACKOFF_S = 30.0
READY_S = 30.0
log = logs.get("crew")


class Crew:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        node_id: str,
        on_message: Callable[[Child, Any], None],
        on_death: Callable[[Child], None],
    ) -> None:
        self._settings, self._clock, self._node_id = settings, clock, node_id
        self._on_message, self._on_death = on_message, on_death
        self.want: Counter[Kind] = Counter({"worker": settings.workers, "consumer": settings.consumers})
        self._children: dict[str, Child] = {}
        self._starting: Counter[Kind] = Counter()
        self._names: set[str] = set()  # taken, also by those that are just being started
        self._spare: Counter[Kind] = Counter()  # come to replace others: not one too many
        self._failures: Counter[Kind] = Counter()  # short lives in a row
        self._restarts: Counter[str] = Counter()
        self._not_before: dict[Kind, float] = {"worker": 0.0, "consumer": 0.0}
        self._retired: dict[str, Any] = {}  # counters of children that ended
        self.problems: dict[Kind, str] = {}

    # --- who is there

    def all(self, kind: Kind | None = None) -> list[Child]:
        return [child for child in self._children.values() if kind is None or child.kind == kind]

    def serving(self) -> list[Child]:
        """Workers that may be given tasks."""
        return [child for child in self.all("worker") if child.ready and child.named and not child.stopping]

    def complete(self) -> bool:
        return all(
            sum(child.ready and not child.stopping for child in self.all(kind)) >= self.want[kind] for kind in self.want
        )

    def records(self) -> list[WorkerRecord]:
        return [child.record() for child in self.all("worker")]

    def metrics(self) -> dict[str, Any]:
        total = self._retired
        for child in self._children.values():
            total = add(total, child.last_beat.metrics)
        return total

    # --- steps of the master's loop

    async def populate(self) -> None:
        """Spawns what is missing and sends home what is too many."""
        for kind in ("worker", "consumer"):
            staying = [child for child in self.all(kind) if not child.stopping]
            for child in staying[self.want[kind] + self._spare[kind] :]:
                child.stop(self._settings.shutdown_grace)
            missing = self.want[kind] - len(staying) - self._starting[kind]
            if missing > 0 and self._clock.uptime() >= self._not_before[kind]:
                await asyncio.gather(*(self.spawn(kind) for _ in range(missing)))

    async def spawn(self, kind: Kind) -> Child | None:
        """None: the machine refused; it is tried again after a pause."""
        name = self._free_name(kind)
        child = Child(
            kind,
            name,
            self._node_id,
            self._settings,
            self._clock,
            self._on_message,
            self._on_death,
            restarts=self._restarts[name],
        )
        self._starting[kind] += 1
        self._names.add(name)
        try:
            await child.spawn()
        except OSError as error:
            self._names.discard(name)
            self._failures[kind] = max(self._failures[kind], FREE)  # the machine refuses: it needs time
            self._back_off(kind, f"a {kind} could not be started: {error}")
            return None
        finally:
            self._starting[kind] -= 1
        self._children[child.id] = child
        return child

    def check(self) -> None:
        for child in self.all():
            child.check()
        for kind in list(self._failures):
            ages = [child.age_s if child.ready else 0.0 for child in self.all(kind)]
            if len(ages) >= self.want[kind] and min(ages, default=0.0) >= SHORT_LIFE_S:
                del self._failures[kind]

    def bury(self, child: Child) -> None:
        """After its death: counted, and its place is free."""
        self._children.pop(child.id, None)
        self._names.discard(child.name)
        self._retired = add(self._retired, {**child.last_beat.metrics, "tick_lag_seconds": {}})
        self._restarts[child.name] += 1
        if child.stopping and child.exit_code == 0:
            return
        if child.age_s < SHORT_LIFE_S:
            self._back_off(
                child.kind, f"{child.kind}s keep dying: the last after {child.age_s:.1f} s, exit code {child.exit_code}"
            )

    def settled(self, kind: Kind) -> None:
        """One of them is ready: whatever was wrong may be over. If it dies soon, the pauses go on where they were."""
        self.problems.pop(kind, None)

    def _back_off(self, kind: Kind, problem: str) -> None:
        """The first are replaced at once; then ever more slowly, so that a broken machine is not buried in processes."""
        self._failures[kind] += 1
        failures = self._failures[kind]
        pause_s = 0.0 if failures < FREE else min(LONGEST_BACKOFF_S, 0.25 * 2 ** (failures - FREE))
        self._not_before[kind] = self._clock.uptime() + pause_s
        if failures >= FREE:
            self.problems[kind] = problem
            log.error(problem, event_name="crew.back_off", next_try_s=pause_s)

    async def replace_workers(self) -> None:
        """HUP: one by one, a new one first."""
        for old in self.all("worker"):
            if old.stopping:
                continue
            self._spare["worker"] += 1
            try:
                new = await self.spawn("worker")
                if new is None or not await self._is_ready(new):
                    log.error("workers not replaced: the new one did not come up", event_name="crew.replace_failed")
                    return
                old.stop(self._settings.shutdown_grace)
            finally:
                self._spare["worker"] -= 1

    async def _is_ready(self, child: Child) -> bool:
        deadline = self._clock.uptime() + READY_S
        while self._clock.uptime() < deadline and child.id in self._children:
            if child.ready:
                return True
            await asyncio.sleep(0.05)
        return False

    def _free_name(self, kind: Kind) -> str:
        n = 1
        while f"{kind}-{n}" in self._names:
            n += 1
        return f"{kind}-{n}"
