"""What a final task answers stays as it is: the cache of final tasks stands on it, and is dropped by nobody."""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Final, get_args

import pytest
from msgspec.structs import replace

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeTask
from scriptdispatch.domain.lifecycle import IllegalTransition
from scriptdispatch.domain.model import EXECUTABLE, FINAL, STATUSES, Error, Execution, Outcome, Status, Task
from scriptdispatch.services.views import task_view
from tests.unit.domain_values import EARLIER, NOW, holds, make_row, make_task

ERROR: Final = Error(code="INTERNAL_ERROR", message="a bug")
# Each constructor of `lifecycle` that makes a change of a task, from a task and an execution as somebody has read them.
CHANGES: Final[dict[str, Callable[[Task, Execution], ChangeTask | None]]] = {
    "mark_unqueued": lambda task, row: lifecycle.mark_unqueued(task),
    "mark_queued": lambda task, row: lifecycle.mark_queued(task) if task.status in EXECUTABLE else None,  # due ones only
    "start": lambda task, row: lifecycle.start(task, row, NOW),
    "foreign_lock": lambda task, row: lifecycle.foreign_lock(task, "somebody", "worker-1", NOW, 0.5),
    "sent": lambda task, row: lifecycle.sent(task, row, "sent", NOW, "taken", "worker-1"),
    "confirm_push": lambda task, row: lifecycle.confirm_push(task, row, NOW),
    "progress": lambda task, row: lifecycle.progress(task.id, row.id, 50, "unpacking", NOW),
    "cancel_waiting": lambda task, row: lifecycle.cancel_waiting(task, "jo", "", NOW),
    "request_cancel": lambda task, row: lifecycle.request_cancel(task, "jo", "", NOW),
    "cancel_answered": lambda task, row: lifecycle.cancel_answered(task.id, row.id, "never_had", NOW),
    "poison": lambda task, row: lifecycle.poison(task, NOW, "master"),
    "internal_failure": lambda task, row: lifecycle.internal_failure(task, ERROR, NOW, "worker-1"),
    "late_note": lambda task, row: lifecycle.late_note(task.id, row, "SUCCESS", NOW),
    "settle": lambda task, row: lifecycle.settle(task, row, NOW, 0.5),
    "settle_presumed": lambda task, row: (lifecycle.settle_presumed(row, NOW) or (None, None))[1],
    "settle_late": lambda task, row: lifecycle.settle_late(task, row, NOW),
}
ROWS: Final = [make_row(sending_at=EARLIER), make_row(attempt=1, sent_at=EARLIER, outcome="success")] + [
    make_row(outcome=outcome, late_success=late, retryable=False)
    for outcome, late in product(get_args(Outcome), (False, True))
]


def test_every_change_of_a_task_is_looked_at_here() -> None:
    """A new one that may touch a final task, such as a restart, has to say what becomes of `queue/redis_cache.py`."""
    made = {
        name
        for name, function in inspect.getmembers(lifecycle, inspect.isfunction)
        if not name.startswith("_") and "ChangeTask" in str(inspect.signature(function).return_annotation)
    }
    assert made == set(CHANGES)


@pytest.mark.parametrize("status", sorted(FINAL))
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_that_comes_after_its_end_changes_what_a_final_task_answers(name: str, status: Status) -> None:
    for read_status, row, asked in product(STATUSES, ROWS, (False, True)):
        read = make_task(status=read_status, execution_id=row.id, cancel_requested=asked)
        try:
            change = CHANGES[name](read, row)
        except IllegalTransition:
            continue
        final = replace(read, status=status, finished_at=NOW, next_run_at=None)
        if change is not None and holds(final, change.expect):
            assert task_view(replace(final, **change.set), None) == task_view(final, None)


@pytest.mark.parametrize("name", ["late_note", "cancel_answered"])
def test_what_comes_after_the_end_is_told_by_the_history_alone(name: str) -> None:
    final = make_task(status="canceled", execution_id="exec-2", cancel_requested=True, finished_at=EARLIER)
    change = CHANGES[name](final, make_row(outcome="timeout"))
    assert change is not None
    assert holds(final, change.expect)
    assert change.history is not None
