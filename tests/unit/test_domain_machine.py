"""A task and its executions under every order of events that hypothesis can think of, one change at a time.

Actors read, decide with `lifecycle`, and apply later, if what they read still holds: as in the product, many of them
hold stale decisions in their hands. The invariants are those of FAULTS: final states stay, moves follow the table,
pushes stay within 1 + retries, at most one execution is open, a hand-back costs nothing.
"""

from datetime import timedelta
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask
from scriptdispatch.domain.lifecycle import TRANSITIONS
from scriptdispatch.domain.model import EXECUTABLE, FINAL, UNDER_WAY, Error, Execution, Outcome, Retry, Status, Task
from tests.unit.domain_values import NOW, holds, make_row, make_task

# Where K2 takes a row that was handed back: restored, or ended by the late success of the one before.
BACK = ("waiting", "failed_waiting_retry", "success")
rarely = st.sampled_from([False, False, True])  # later, by an actor that has stood still


def _error(code: str) -> Error:
    return Error(code=code, message="as drawn")


class TaskMachine(RuleBasedStateMachine):
    decided = Bundle("decided")  # changes in somebody's hands, not applied yet

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.task: Task = make_task(retry=Retry(max_retries=2, delay_seconds=1))
        self.rows: dict[str, Execution] = {}
        self.moves: list[tuple[Status, Status]] = []
        self.ever_final: Status | None = None
        self.retries_begun = 0

    # --- the store

    def decide(self, change: ChangeTask | ChangeExecution, later: bool) -> Any:
        """Applied at once, or kept in somebody's hands until the world has moved on."""
        if later:
            return change
        self.apply(change)
        return multiple()

    def apply(self, change: ChangeTask | ChangeExecution) -> bool:
        self.now += timedelta(seconds=1)
        record = self.rows[change.execution_id] if isinstance(change, ChangeExecution) else self.task
        if not holds(record, change.expect):
            return False
        after: Any = msgspec.structs.replace(record, **change.set)
        if isinstance(change, ChangeExecution):
            self._row_decided_once(record, after)  # type: ignore[arg-type]
            self.rows[after.id] = after
        else:
            self._task_moved_right(record, after, change)  # type: ignore[arg-type]
            self.task = after
        return True

    def _row_decided_once(self, before: Execution, after: Execution) -> None:
        if not before.active:
            assert (after.active, after.outcome, after.sending_at) == (False, before.outcome, before.sending_at)
        if after.outcome == "handed_back" and after.closed_by == "somebody":
            assert after.sending_at is None, "only its own worker knows that a stamped push was not taken"

    def _task_moved_right(self, before: Task, after: Task, change: ChangeTask) -> None:
        """What each move costs, counted here from the outside."""
        if "status" not in change.set:
            return
        self.moves.append((before.status, after.status))
        assert change.history is not None
        row = self.rows.get(change.history.execution_id or "")
        if after.status == "running" or row is None:  # a start, or a lock of somebody else
            self.retries_begun += before.status == "failed_waiting_retry" and after.status != "canceled"
        elif before.status == "running" and row.outcome == "handed_back" and after.status in BACK:
            self.retries_begun -= row.from_status == "failed_waiting_retry"
            assert after.execution_id == row.previous_execution_id
        if before.cancel_requested:
            assert after.status in FINAL | {"send_success"}, "after a cancel request nothing is tried again"
        if row is not None and row.late_success and before.status in UNDER_WAY:
            assert after.status == "success"

    @rule(change=consumes(decided))
    def somebody_gets_round_to_it(self, change: Any) -> None:
        self.apply(change)

    # --- the worker

    @rule(target=decided, later=rarely)
    def w3_insert_w4_start(self, later: bool) -> Any:
        start = self._inserted()
        return self.decide(start, later) if start else multiple()

    def _inserted(self) -> ChangeTask | None:
        """W3 is one step with its unique index; the start is decided on what was read, and may be applied later."""
        if self.task.status not in EXECUTABLE or any(row.active for row in self.rows.values()):
            return None
        number = len(self.rows) + 1
        row = make_row(
            id=f"exec-{number:03d}",
            attempt=number,
            fencing_token=number,
            from_status=self.task.status,
            previous_execution_id=self.task.execution_id,
            previous_push=self.task.push,
        )
        self.rows[row.id] = row
        return lifecycle.start(self.task, row, self.now)

    @rule(target=decided, later=rarely, data=st.data())
    def w5_stamp_w7_record(self, later: bool, data: st.DataObject) -> Any:
        row = self._drawn(data, active=True)
        if row is None:
            return multiple()
        if row.sending_at is None:
            # The worker stamps only after its own W4 was won.
            if self.task.execution_id == row.id and self.task.status == "running":
                return self.decide(lifecycle.stamp(row, row.worker_id, self.now, 30), later)
            undo = lifecycle.close_unsent(
                row, "handed_back", self.now, closed_by=row.worker_id, reason="undo", error=_error("SYSTEM_ERROR")
            )
            return self.decide(undo, later)
        push = data.draw(st.sampled_from(["sent", "unknown"]))
        return self.decide(lifecycle.sent(self.task, row, push, self.now, "taken", row.worker_id), later)

    @rule(target=decided, later=rarely, steps=st.integers(1, 3))
    def a_worker_goes_on(self, later: bool, steps: int) -> Any:
        """Start, stamp and record in one go: the ways that need a pushed execution are long enough without it. The last
        of the steps may be left in its hands."""
        start = self._inserted()
        if start is None:
            return multiple()
        row = self.rows[start.set["execution_id"]]
        todo = [start, lifecycle.stamp(row, row.worker_id, self.now, 30)]
        todo.append(lifecycle.sent(self.task, row, "sent", self.now, "taken", row.worker_id))
        for change in todo[: steps - 1]:
            self.apply(change)
        return self.decide(todo[steps - 1], later)

    @rule(target=decided, later=rarely, data=st.data(), outcome=st.sampled_from(["failed", "refused", "handed_back"]))
    def w7_not_taken(self, later: bool, data: st.DataObject, outcome: Outcome) -> Any:
        row = self._drawn(data, active=True)
        if row is None or row.sending_at is None:
            return multiple()
        change = lifecycle.close_own(
            row, outcome, self.now, worker_id=row.worker_id, closed_by=row.worker_id, reason="not taken",
            error=_error("DISPATCH_FAILED"), push="not_sent",
        )  # fmt: skip
        return self.decide(change, later)

    # --- everybody else

    @rule(target=decided, later=rarely, data=st.data(), outcome=st.sampled_from(["success", "failed", "canceled"]))
    def c2_result(self, later: bool, data: st.DataObject, outcome: Outcome) -> Any:
        row = self._drawn(data)
        if row is None or row.sending_at is None:
            return multiple()
        if row.outcome == "timeout" and outcome == "success":
            return self.decide(lifecycle.note_late_success(row), later)
        error = _error("EXECUTION_FAILED") if outcome == "failed" else None
        return self.decide(lifecycle.close(row, outcome, self.now, closed_by="closer", reason=outcome, error=error), later)

    @rule(target=decided, later=rarely, data=st.data(), outcome=st.sampled_from(["timeout", "released", "dropped"]))
    def t1_d1_u4_give_up(self, later: bool, data: st.DataObject, outcome: Outcome) -> Any:
        row = self._drawn(data, active=True)
        if row is None or row.sending_at is None:
            return multiple()
        code = {"timeout": "TIMEOUT", "released": "LOCK_RELEASED", "dropped": "CANCELED"}[outcome]
        change = lifecycle.give_up(row, outcome, self.now, closed_by="somebody", reason=outcome, error=_error(code))
        return self.decide(change, later)

    @rule(target=decided, later=rarely, data=st.data(), outcome=st.sampled_from(["handed_back", "canceled"]))
    def m1_u2_close_unsent(self, later: bool, data: st.DataObject, outcome: Outcome) -> Any:
        row = self._drawn(data, active=True)
        if row is None:
            return multiple()
        error = _error("SYSTEM_ERROR") if outcome == "handed_back" else None
        change = lifecycle.close_unsent(row, outcome, self.now, closed_by="somebody", reason=outcome, error=error)
        return self.decide(change, later)

    @rule(target=decided, later=rarely, data=st.data())
    def k2_settle(self, later: bool, data: st.DataObject) -> Any:
        row = self._drawn(data, active=False)
        change = row and lifecycle.settle(self.task, row, self.now, 0.5)
        return self.decide(change, later) if change else multiple()

    @rule(target=decided, later=rarely, data=st.data())
    def c3_settle_late(self, later: bool, data: st.DataObject) -> Any:
        row = self._drawn(data, active=False)
        change = row and lifecycle.settle_late(self.task, row, self.now)
        return self.decide(change, later) if change else multiple()

    @rule(target=decided, later=rarely)
    def u1_u3_cancel(self, later: bool) -> Any:
        if self.task.status in EXECUTABLE:
            return self.decide(lifecycle.cancel_waiting(self.task, "jo", "", self.now), later)
        if self.task.status in UNDER_WAY:
            return self.decide(lifecycle.request_cancel(self.task, "jo", "", self.now), later)
        return multiple()

    @rule(target=decided, later=rarely)
    def w2_foreign_lock(self, later: bool) -> Any:
        if self.task.status not in EXECUTABLE:
            return multiple()
        return self.decide(lifecycle.foreign_lock(self.task, "somebody", "worker-1", self.now, 0.5), later)

    def _drawn(self, data: st.DataObject, active: bool | None = None) -> Execution | None:
        rows = [row for row in self.rows.values() if active is None or row.active is active]
        return data.draw(st.sampled_from(rows)) if rows else None

    # --- what must hold at any time

    @invariant()
    def every_move_is_in_the_table(self) -> None:
        assert all(to in TRANSITIONS[before] for before, to in self.moves)

    @invariant()
    def a_final_state_stays(self) -> None:
        if self.ever_final:
            assert self.task.status == self.ever_final
        if self.task.status in FINAL:
            self.ever_final = self.task.status
            assert (self.task.next_run_at, self.task.queued) == (None, False)
            assert self.task.finished_at is not None

    @invariant()
    def retries_are_counted_right(self) -> None:
        assert self.task.retry_count == self.retries_begun <= self.task.retry.max_retries
        pushed = [row for row in self.rows.values() if row.sending_at and row.outcome != "handed_back"]
        assert len(pushed) <= 1 + self.task.retry.max_retries

    @invariant()
    def it_says_where_it_stands(self) -> None:
        if self.task.status in EXECUTABLE:
            assert self.task.next_run_at is not None
        if self.task.status in UNDER_WAY:
            assert self.task.execution_id in self.rows
        if self.task.status == "waiting":
            assert self.task.execution_id is None
        closed = self.task.execution_id and not self.rows[self.task.execution_id].active
        assert self.task.status not in ("failed_waiting_retry", "success") or not self.task.execution_id or closed

    def teardown(self) -> None:
        """Quiet comes: whoever reconciles settles what is closed, and the task is where its row says, or can go on."""
        row = self.rows.get(self.task.execution_id or "")
        if row and not row.active and self.task.status in UNDER_WAY:
            change = lifecycle.settle(self.task, row, self.now, 0.5)
            assert change is not None
            assert self.apply(change)
            assert self.task.status not in UNDER_WAY
            self.every_move_is_in_the_table()


TestTaskMachine = TaskMachine.TestCase
TestTaskMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
