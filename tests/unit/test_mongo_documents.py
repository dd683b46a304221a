"""How records become MongoDB documents, changes become statements, and the driver's errors become ours. Without a server."""

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("pymongo")

import bson.errors
import msgspec
import pymongo.errors
from bson import ObjectId

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask, InsertTask
from scriptdispatch.domain.model import Error, Execution, History, LogLine, Retry, StoredLine, Task
from scriptdispatch.errors import SettingsError, StoreUnavailable
from scriptdispatch.store import mongo_errors
from scriptdispatch.store.mongo_documents import (
    EXECUTION,
    HEAVY,
    HISTORY,
    PER_STATEMENT,
    TASK,
    block_document,
    block_lines,
    blocks,
    execution_cas,
    history_document,
    history_rows,
    label_text,
    statements,
    task_cas,
    task_document,
)
from scriptdispatch.store.mongo_errors import Said, duplicates, said, translated
from scriptdispatch.store.mongo_reads import due_queries, task_query
from scriptdispatch.store.port import TaskFilter

NOW = datetime(2026, 11, 18, 12, 0, 0, 123_000, tzinfo=UTC)
TOKEN = ObjectId()


def task(n: int = 1, **values: Any) -> Task:
    plain: dict[str, Any] = {"id": f"task-{n}", "name": "restart", "device_id": f"dev-{n}", "lane_key": f"2-{n}"}
    return Task(**{**plain, "next_run_at": NOW, "created_at": NOW, "updated_at": NOW, **values})


def row(n: int = 1, **values: Any) -> Execution:
    plain: dict[str, Any] = {
        "id": f"exec-{n}",
        "task_id": f"task-{n}",
        "round": 1,
        "device_id": f"dev-{n}",
        "script_id": None,
    }
    rest = {"timeout_seconds": 60, "worker_id": "w", "node_id": "n", "from_status": "waiting"}
    return Execution(**{**plain, **rest, "previous_execution_id": None, "created_at": NOW, "attempt": 1, **values})


def note(reason: str) -> History:
    return History(at=NOW, kind="INFO", actor="me", reason=reason)


# --- documents


def test_a_task_comes_back_as_it_was_and_nothing_is_stored_where_there_is_nothing() -> None:
    full = task(
        params={"a.b": {"$set": 1, "": None}, "nul\0": [2**70]},
        labels={"site": "a=b", "x=y": "", "50%3D": "1"},
        error=Error(code="TIMEOUT", message="late", details={"$where": 1}),
        retry=Retry(strategy="daily", delay_seconds=1.5),
        result=[1, {"deep": None}],
        secret_params=["a"],
    )
    for one in (full, task()):
        document = TASK.to_document(one)
        assert document["_id"] == one.id
        assert None not in document.values()
        assert TASK.from_document(document) == one


def test_what_users_send_never_becomes_a_field_name() -> None:
    document = TASK.to_document(task(params={"$where": "1"}, result={"a.b": 1}, labels={"$x": "y"}))
    assert document["params"] == '{"$where":"1"}'
    assert document["result"] == '{"a.b":1}'
    assert document["labels"] == ["$x=y"]


def test_labels_that_look_alike_are_told_apart() -> None:
    assert len({label_text("a", "b=c"), label_text("a=b", "c"), label_text("a%3Db", "c")}) == 3


def test_a_new_task_has_its_first_history_row_in_the_same_document() -> None:
    document = task_document(InsertTask(task=task(id="0190-abcdefgh"), script=None, history=note("created")))
    assert [HISTORY.from_document(entry) for entry in document["history"]] == [note("created")]
    assert document["tail"] == "abcdefgh"


def test_only_what_is_unusual_in_a_task_is_in_an_index() -> None:
    def unusual(**values: Any) -> list[str] | None:
        return task_document(InsertTask(task=task(**values), script=None, history=note("created"))).get("unusual")

    assert unusual() is None
    assert unusual(priority="high", type="http") == ["type=http", "priority=high"]


def line(task: str, execution: str, seq: int | None, content: str = "x", **more: Any) -> LogLine:
    return LogLine(task_id=task, execution_id=execution, seq=seq, time=NOW, stream="stdout", content=content, **more)


def test_a_block_says_once_what_its_lines_share_and_only_what_is_not_usual() -> None:
    lines = [line("t", "e", 3), line("t", "e", 9, late=True)]
    document = block_document(lines, 7, NOW)
    assert document == {
        "_id": 7, "n": 2, "stored_at": NOW, "task_id": "t", "execution_id": "e", "seqs": [3, 9], "times": [NOW, NOW],
        "streams": ["stdout", "stdout"], "contents": ["x", "x"], "late": [1],
    }  # fmt: skip
    assert block_lines(document) == [StoredLine(cursor=7, line=lines[0]), StoredLine(cursor=8, line=lines[1])]


def test_a_block_without_numbers_has_no_list_of_them() -> None:
    lines = [line("t", "e", None), line("t", "e", None)]
    document = block_document(lines, 1, NOW)
    assert "seqs" not in document
    assert [stored.line for stored in block_lines(document)] == lines


def test_lines_are_put_into_blocks_by_task_in_their_order() -> None:
    lines = [
        line("t", "a", 1),
        line("u", "c", 1),
        line("t", "a", 2),
        line("t", "b", 1),
        line("t", "a", None),
        line("t", "a", 3),
    ]
    made = [[(one.execution_id, one.seq) for one in block] for block in blocks(lines)]
    assert made == [[("a", 1), ("a", 2)], [("b", 1)], [("a", None)], [("a", 3)], [("c", 1)]]


def test_a_block_is_neither_long_nor_heavy() -> None:
    assert [len(block) for block in blocks([line("t", "e", n) for n in range(250)])] == [100, 100, 50]
    assert [len(block) for block in blocks([line("t", "e", n, "x" * 900_000) for n in range(5)])] == [2, 2, 1]


def test_an_expectation_of_nothing_matches_what_is_absent() -> None:
    expect = {"execution_id": None, "status": ("running", "send_success"), "error": Error(code="A", message="b")}
    assert TASK.expectation(expect) == {
        "execution_id": None,
        "status": {"$in": ["running", "send_success"]},
        "error": {"code": "A", "message": "b", "details": "{}"},
    }


# --- statements


def test_changes_with_equal_values_are_one_statement_that_names_all_documents() -> None:
    changes = [lifecycle.sent(task(n), row(n), "sent", NOW, "taken", "w") for n in range(3)]
    (made,) = statements([task_cas(change) for change in changes], TOKEN)
    assert made.filter == {
        "_id": {"$in": ["task-0", "task-1", "task-2"]},
        "status": "running",
        "execution_id": {"$in": ["exec-0", "exec-1", "exec-2"]},
        "history.op": {"$ne": TOKEN},
    }
    assert made.ids == ["task-0", "task-1", "task-2"]


def test_only_what_is_equal_to_the_last_value_is_written_as_one_update() -> None:
    same = [ChangeTask(task_id=f"t{n}", expect={"status": "waiting"}, set={"queued": False}) for n in range(3)]
    (alike,) = statements([task_cas(change) for change in same], TOKEN)
    assert alike.update == {"$set": {"queued": False, "op": TOKEN}}
    own = [ChangeTask(task_id=f"t{n}", expect={"status": "waiting"}, set={"progress": n}) for n in range(3)]
    (different,) = statements([task_cas(change) for change in own], TOKEN)
    assert isinstance(different.update, list)


def test_each_documents_own_values_stand_at_the_place_of_its_id_and_are_literal() -> None:
    changes = [lifecycle.start(task(n), row(n), NOW + timedelta(milliseconds=n)) for n in range(3)]
    (made,) = statements([task_cas(change) for change in changes], TOKEN)
    assert isinstance(made.update, list)
    stage = made.update[0]["$set"]
    values, place = stage["execution_id"]["$arrayElemAt"]
    assert values == {"$literal": ["exec-0", "exec-1", "exec-2"]}
    assert place == {"$indexOfArray": [{"$literal": ["task-0", "task-1", "task-2"]}, "$_id"]}
    assert stage["status"] == {"$literal": "running"}
    rows = stage["history"]["$slice"][0]["$concatArrays"][1][0]["$arrayElemAt"][0]["$literal"]
    assert [(one["execution_id"], one["op"]) for one in rows] == [(f"exec-{n}", TOKEN) for n in range(3)]


def test_a_batch_with_few_different_values_is_parted_into_statements_of_the_cheap_kind() -> None:
    times = [NOW, NOW + timedelta(milliseconds=1)]
    changes = [lifecycle.sent(task(n), row(n), "sent", times[n % 2], "taken", "w-1") for n in range(40)]
    made = statements([task_cas(change) for change in changes], TOKEN)
    assert [len(one.ids) for one in made] == [20, 20]
    assert all(isinstance(one.update, dict) for one in made)


@pytest.mark.parametrize(
    "other",
    [
        {"expect": {"status": "running", "attempt": 1}},
        {"expect": {"status": "running", "attempt": True}},
        {"expect": {"status": "running"}},
        {"expect": {"status": "running", "attempt": 0, "execution_id": None}},
        {"expect": {"status": "running", "attempt": 0, "execution_id": "e"}},
        {"set": {"step": "x", "progress": 1}},
        {"history": note("x")},
    ],
)
def test_changes_that_expect_or_write_something_else_do_not_share_a_statement(other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"expect": {"status": "running", "attempt": 0}, "set": {"step": "x"}}
    pair = [ChangeTask(task_id="a", **plain), ChangeTask(task_id="b", **{**plain, **other})]
    assert [made.ids for made in statements([task_cas(change) for change in pair], TOKEN)] == [["a"], ["b"]]


def test_a_statement_has_only_so_many_documents() -> None:
    changes = [ChangeTask(task_id=str(n), expect={}, set={"progress": n}) for n in range(2 * PER_STATEMENT + 1)]
    made = statements([task_cas(change) for change in changes], TOKEN)
    assert [len(one.ids) for one in made] == [PER_STATEMENT, PER_STATEMENT, 1]


def test_heavy_values_do_not_meet_in_one_statement() -> None:
    closings = [
        lifecycle.close(row(n), "success", NOW, closed_by="c", reason="ok", result="x" * (HEAVY // 3)) for n in range(7)
    ]
    made = statements([execution_cas(change) for change in closings], TOKEN)
    assert [one.ids for one in made] == [["exec-0", "exec-1"], ["exec-2", "exec-3"], ["exec-4", "exec-5"], ["exec-6"]]
    giants = [lifecycle.close(row(n), "success", NOW, closed_by="c", reason="ok", result="x" * HEAVY) for n in range(2)]
    assert len(statements([execution_cas(change) for change in giants], TOKEN)) == 2


def test_every_statement_passes_over_what_it_has_done_and_leaves_its_mark() -> None:
    closing = lifecycle.close(row(), "success", NOW, closed_by="c", reason="ok")
    stamping = lifecycle.stamp(row(), "w", NOW, 30)
    plain = ChangeExecution(execution_id="e", expect={}, set={"exit_code": 3})
    for change, mark in ((closing, "op_close"), (stamping, "op_stamp"), (plain, "op")):
        (made,) = statements([execution_cas(change)], TOKEN)
        assert made.filter[mark] == {"$ne": TOKEN}
        assert isinstance(made.update, dict)
        assert made.update["$set"][mark] == TOKEN
    (made,) = statements([task_cas(ChangeTask(task_id="t", expect={}, set={}, history=note("x")))], TOKEN)
    assert made.filter == {"_id": "t", "history.op": {"$ne": TOKEN}}
    assert isinstance(made.update, dict)
    assert made.update.keys() == {"$push"}


def test_the_marks_are_no_part_of_a_record() -> None:
    document = {**EXECUTION.to_document(row()), "op": TOKEN, "op_close": TOKEN, "op_stamp": TOKEN}
    assert EXECUTION.from_document(document) == row()


# --- against an imitation of the server (never the proof: the contract suite runs on a real one)


def test_filters_find_what_they_say() -> None:
    mongomock = pytest.importorskip("mongomock")
    collection = mongomock.MongoClient(tz_aware=True).db.tasks
    lot = [
        task(1, labels={"site": "a"}, status="failed", error=Error(code="TIMEOUT", message="")),
        task(2, labels={"site": "a", "team": "x"}, priority="high"),
        task(3, device_id=None, status="running", next_run_at=None),
    ]
    collection.insert_many([TASK.to_document(one) for one in lot])

    def found(where: dict[str, Any]) -> list[str]:
        return sorted(document["_id"] for document in collection.find(where))

    assert found(task_query(TaskFilter(labels=(("site", "a"), ("team", "x")))).where) == ["task-2"]
    assert found(task_query(TaskFilter(statuses=("failed", "running"))).where) == ["task-1", "task-3"]
    assert found(task_query(TaskFilter(error_code="TIMEOUT")).where) == ["task-1"]
    assert found(TASK.expectation({"device_id": None})) == ["task-3"]
    assert found(TASK.expectation({"status": "waiting", "execution_id": (None, "x")})) == ["task-2"]
    assert [TASK.from_document(document) for document in collection.find().sort("_id", 1)] == lot


def test_a_plain_statement_changes_what_it_should_and_no_more_when_repeated() -> None:
    mongomock = pytest.importorskip("mongomock")
    collection = mongomock.MongoClient(tz_aware=True).db.tasks
    collection.insert_one(task_document(InsertTask(task=task(), script=None, history=note("created"))))
    (made,) = statements([task_cas(lifecycle.start(task(), row(), NOW))], TOKEN)
    first = collection.update_many(made.filter, made.update)
    again = collection.update_many(made.filter, made.update)
    assert (first.modified_count, again.modified_count) == (1, 0)
    (document,) = collection.find()
    assert [entry["reason"] for entry in document["history"]] == ["created", "started"]
    assert (document["status"], document["execution_id"]) == ("running", "exec-1")


# --- queries


def test_due_tasks_of_one_moment_are_passed_by_id() -> None:
    first, later = due_queries(NOW, (NOW - timedelta(seconds=1), "t"))
    assert first.where["_id"] == {"$gt": "t"}
    assert later.where["next_run_at"]["$gt"] == NOW - timedelta(seconds=1)
    assert due_queries(NOW, (NOW + timedelta(seconds=1), "t")) == []


# --- errors


def test_every_error_of_the_driver_has_its_line_in_the_table() -> None:
    """A new one of a later version falls to PyMongoError, "unclear", until somebody has thought about it."""
    kinds = [
        kind
        for module in (pymongo.errors, bson.errors)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.__name__
    ]
    thought_of = [kind for kind, _ in mongo_errors.TABLE if kind is not pymongo.errors.PyMongoError]
    left = [kind for kind in kinds if not issubclass(kind, tuple(thought_of))]
    assert {kind.__name__ for kind in left} <= {"PyMongoError", "_PoolClosedError"}
    order = [kind for kind, _ in mongo_errors.TABLE]
    assert all(not issubclass(later, earlier) for i, earlier in enumerate(order) for later in order[i + 1 :])


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (pymongo.errors.ServerSelectionTimeoutError("none"), Said.NOT_DONE),
        (pymongo.errors.AutoReconnect("closed"), Said.UNCLEAR),
        (pymongo.errors.NetworkTimeout("slow"), Said.UNCLEAR),
        (pymongo.errors.NotPrimaryError("stepped down"), Said.UNCLEAR),
        (pymongo.errors.WTimeoutError("no majority", 64), Said.UNCLEAR),
        (pymongo.errors.OperationFailure("interrupted", 11602), Said.UNCLEAR),
        (pymongo.errors.OperationFailure("login", 18), Said.NOT_DONE),
        (pymongo.errors.OperationFailure("bad", 9), Said.REFUSED),
        (pymongo.errors.DocumentTooLarge("big"), Said.REFUSED),
        (pymongo.errors.InvalidURI("address"), Said.SETTINGS),
        (
            pymongo.errors.BulkWriteError({"writeErrors": [{"code": 11000}], "writeConcernErrors": [{"code": 64}]}),
            Said.UNCLEAR,
        ),
        (pymongo.errors.BulkWriteError({"writeErrors": [{"code": 9}]}), Said.REFUSED),
        (pymongo.errors.BulkWriteError({"writeErrors": [{"code": 9}, {"code": 91}]}), Said.UNCLEAR),
    ],
)
def test_what_an_error_says_of_the_operation(error: Exception, verdict: Said) -> None:
    assert said(error) is verdict


def test_only_a_write_can_have_an_unknown_outcome() -> None:
    lost = pymongo.errors.AutoReconnect("closed")
    for writing in (True, False):
        error = translated(lost, writing=writing)
        assert isinstance(error, StoreUnavailable)
        assert error.outcome_unknown is writing
    assert isinstance(translated(pymongo.errors.ConfigurationError("x"), writing=True), SettingsError)


def test_duplicates_are_named_by_the_fields_of_their_index() -> None:
    taken = {"index": 3, "code": 11000, "keyPattern": {"device_id": 1, "fencing_token": 1}}
    assert duplicates(pymongo.errors.BulkWriteError({"writeErrors": [taken]})) == {3: ("device_id", "fencing_token")}
    with pytest.raises(pymongo.errors.BulkWriteError):
        duplicates(pymongo.errors.BulkWriteError({"writeErrors": [taken, {"index": 4, "code": 91}]}))


def test_rows_about_the_execution_under_way_are_alike_and_come_back_whole() -> None:
    start = History(at=NOW, kind="STATE_CHANGE", actor="w", reason="started", execution_id="e-1", to_status="running")
    taken = History(at=NOW, kind="STATE_CHANGE", actor="w", reason="taken", execution_id="e-1")
    note_of_old = msgspec.structs.replace(taken, reason="late", execution_id="e-0")
    over = msgspec.structs.replace(taken, reason="over")
    stored = [
        history_document(start, None),
        history_document(taken, "e-1"),
        history_document(note_of_old, None),
        history_document(over, "e-1"),
    ]
    assert "e-1" not in stored[1].values()
    assert history_rows(stored) == [start, taken, note_of_old, over]
    assert history_document(msgspec.structs.replace(over, execution_id="e-9"), "e-9") == history_document(over, "e-1")


def test_a_row_about_an_execution_that_is_no_longer_under_way_names_it() -> None:
    """After a hand-back the task points at an execution before the last one that was started."""
    late = History(at=NOW, kind="STATE_CHANGE", actor="central", reason="late success", execution_id="e-1")
    change = ChangeTask(
        task_id="t",
        expect={"status": "failed_waiting_retry", "execution_id": "e-1"},
        set={"status": "success"},
        history=late,
    )
    history = task_cas(change).history
    assert history is not None
    assert history["execution_id"] == "e-1"


def test_the_same_step_of_many_tasks_is_one_statement_with_one_set_of_values() -> None:
    changes = [lifecycle.sent(task(n), row(n), "sent", NOW, "taken by central control", "w-1") for n in range(PER_STATEMENT)]
    (made,) = statements([task_cas(change) for change in changes], TOKEN)
    assert len(made.ids) == PER_STATEMENT
    assert isinstance(made.update, dict)
    (made,) = statements([execution_cas(lifecycle.record_push(row(n), "sent", NOW, 30)) for n in range(20)], TOKEN)
    assert isinstance(made.update, dict)
