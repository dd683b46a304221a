"""Hears the ready queue and hands tasks to workers (SPEC 3.2, 3.4, 3.5).

Heard items go through the *refresh queue* into the *waiting queue* (each task once; in order of its lane key) and from
there to the worker that the balancer picks. Only as much is taken from the cluster's queue as workers have room for, so
the rest stays where every node can see it. An item is given up (finished, given back) when its worker has reported it.
"""

import asyncio
import heapq
from collections.abc import Callable, Sequence

from scriptdispatch import crashpoints, logs, wire
from scriptdispatch.domain.balance import CHOOSERS, Hand
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.master.children import Child
from scriptdispatch.queue.port import Leased, Queue
from scriptdispatch.settings import Settings

TAKE = 500  # at most in one step
log = logs.get("dispatcher")


class Dispatcher:
    """`workers` answers the ready workers. `poisoned` is called with an item that killed too many of them."""

    def __init__(
        self,
        queue: Queue,
        settings: Settings,
        node_id: str,
        workers: Callable[[], Sequence[Child]],
        poison_limit: int,
        poisoned: Callable[[Leased], None],
    ) -> None:
        self._queue, self._settings, self._node_id = queue, settings, node_id
        self._workers, self._poison_limit, self._poisoned = workers, poison_limit, poisoned
        self._choose = CHOOSERS[settings.balance]
        self._turn = 0
        self._refresh: list[Leased] = []
        self._waiting: list[tuple[str, str, Leased]] = []  # a heap by lane key
        self._hands: dict[str, Hand] = {}
        self._in_hand: dict[str, dict[str, Leased]] = {}  # worker id → task id → item
        self._alone: dict[str, str] = {}  # worker id → the task that it has, or will have, for itself
        self._finished: list[Leased] = []
        self._given_back: list[Leased] = []
        self._wake = asyncio.Event()
        self._quiet_until = 0.0
        self.breaker_open = False
        self.stopping = False

    # --- hear

    async def listen(self) -> None:
        """Blocks on the ready queue, no polling; ends when the node stops."""
        types = self._settings.task_types
        while not self.stopping:
            room = self._room()
            if room <= 0 or self._held():
                await self._until_woken()
                continue
            try:
                heard = await self._queue.take(
                    self._node_id, min(room, TAKE), wait_s=self._settings.check_interval, types=types
                )
            except QueueUnavailable as error:
                log.warning("the queue is away", event_name="queue.away", reason=str(error))
                self.pause(1.0)
                continue
            if heard:
                await crashpoints.reach("master.after_take", heard[0].task_id)
                self.hear(heard)

    def hear(self, items: Sequence[Leased]) -> None:
        """Leased items: from here on they are this node's to hand out, or to give back."""
        self._refresh += items
        self.check()

    def _held(self) -> bool:
        return self.breaker_open or asyncio.get_running_loop().time() < self._quiet_until

    def pause(self, seconds: float) -> None:
        """Something that every task needs is away: hand out nothing for a moment."""
        self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + seconds)

    async def _until_woken(self) -> None:
        """Until there may be room again: a worker reports, joins, or a pause is over."""
        self._wake.clear()
        left_s = self._quiet_until - asyncio.get_running_loop().time()
        limit_s = left_s if left_s > 0 and not self.breaker_open else self._settings.check_interval
        try:
            await asyncio.wait_for(self._wake.wait(), limit_s)
        except TimeoutError:
            return

    def _room(self) -> int:
        free = sum(self._settings.worker_capacity - self._hand(worker).load for worker in self._workers())
        return free - len(self._waiting) - len(self._refresh)

    def wake(self) -> None:
        self._wake.set()

    # --- check: refresh queue → waiting queue → workers

    def check(self) -> None:
        """At once when something is heard or reported, and every 5 s as the safety net."""
        self._fill_waiting()
        batches: dict[str, list[Leased]] = {}
        workers = {worker.id: worker for worker in self._workers()}
        stay: list[tuple[str, str, Leased]] = []
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            item = entry[2]
            hand = self._pick(item, workers)
            if hand is None:
                stay.append(entry)
                if not item.crashes:
                    break  # everybody is full
                continue
            self._assign(item, hand, batches)
        for entry in stay:
            heapq.heappush(self._waiting, entry)
        for worker_id, items in batches.items():
            for chunk in wire.chunks(items):
                workers[worker_id].send(wire.Assign(items=chunk))
        if self.stopping or self._held():
            self._return_waiting()

    def _fill_waiting(self) -> None:
        known = {entry[2].task_id for entry in self._waiting}
        for item in self._refresh:
            if item.crashes >= self._poison_limit:
                self._poisoned(item)
            elif item.task_id not in known:
                known.add(item.task_id)
                heapq.heappush(self._waiting, (item.lane_key, item.task_id, item))
        self._refresh.clear()

    def _pick(self, item: Leased, workers: dict[str, Child]) -> Hand | None:
        hands = [self._hand(worker) for worker in workers.values()]
        if item.crashes:
            return self._pick_alone(item, hands)
        open_hands = [
            hand for hand in hands if hand.load < self._settings.worker_capacity and hand.worker_id not in self._alone
        ]
        if not open_hands:
            return None
        self._turn += 1
        return self._choose(open_hands, item.device_id, self._turn)

    def _pick_alone(self, item: Leased, hands: list[Hand]) -> Hand | None:
        """A worker died with it in hand: it goes out alone, so that its neighbours do not share the verdict."""
        for worker_id, task_id in self._alone.items():
            if task_id == item.task_id:
                mine = next((hand for hand in hands if hand.worker_id == worker_id), None)
                return mine if mine is not None and mine.load == 0 else None
        free = [hand for hand in hands if hand.worker_id not in self._alone]
        if not free or (len(hands) > 1 and len(free) == 1):
            return None  # one worker at least goes on with the others' work
        hand = min(free, key=lambda hand: hand.load)
        self._alone[hand.worker_id] = item.task_id
        return hand if hand.load == 0 else None

    def _assign(self, item: Leased, hand: Hand, batches: dict[str, list[Leased]]) -> None:
        hand.load += 1
        if item.device_id is not None:
            hand.devices[item.device_id] += 1
        self._in_hand.setdefault(hand.worker_id, {})[item.task_id] = item
        batches.setdefault(hand.worker_id, []).append(item)

    def _return_waiting(self) -> None:
        """Nothing goes out now: back to where other nodes can see it."""
        self._given_back += [item for _, _, item in self._waiting]
        self._waiting.clear()

    # --- reports

    def done(self, worker: Child, report: wire.Done) -> None:
        """W8."""
        for item in (*report.finished, *report.given_back):
            self._forget(worker.id, item)
        self._finished += report.finished
        self._given_back += report.given_back
        if report.pause_s:
            self.pause(report.pause_s)
        self.check()
        self.wake()

    def lost(self, worker: Child) -> list[Leased]:
        """The worker is dead: what it had in hand."""
        self._hands.pop(worker.id, None)
        self._alone.pop(worker.id, None)
        return list(self._in_hand.pop(worker.id, {}).values())

    def in_hand(self) -> int:
        return sum(len(items) for items in self._in_hand.values())

    async def give_up(self) -> None:
        """Tells the queue what was reported. Kept and tried again if it is away: the lease is renewed meanwhile."""
        while self._finished or self._given_back:
            finished, self._finished = self._finished, []
            given_back, self._given_back = self._given_back, []
            try:
                if finished:
                    await self._queue.finish(finished)
                    finished = []
                if given_back:
                    await self._queue.give_back(given_back)
                    given_back = []
            except QueueUnavailable as error:
                self._finished += finished
                self._given_back += given_back
                log.warning("the queue is away", event_name="queue.away", reason=str(error))
                return

    def _hand(self, worker: Child) -> Hand:
        if worker.id not in self._hands:
            self._hands[worker.id] = Hand(worker.id)
        return self._hands[worker.id]

    def _forget(self, worker_id: str, item: Leased) -> None:
        if self._in_hand.get(worker_id, {}).pop(item.task_id, None) is None:
            return
        hand = self._hands[worker_id]
        hand.load -= 1
        if item.device_id is not None:
            hand.devices[item.device_id] -= 1
            if not hand.devices[item.device_id]:
                del hand.devices[item.device_id]
        if self._alone.get(worker_id) == item.task_id:
            del self._alone[worker_id]
