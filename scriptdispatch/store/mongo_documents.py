"""Between records and MongoDB documents: how a task becomes a document, an expectation a filter, a change an update.

Pure. `id` is `_id`; what is None is left out; times are dates. What users and devices send as open structures (params,
results, error details) is kept as JSON text: its keys never become field names, so nothing in them can act as an operator,
meet a limit of BSON or fail to come back as it was. Labels are texts `name=value`, so that one index finds them all.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import UnionType
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

import msgspec
from bson import ObjectId

from scriptdispatch.domain.changes import ChangeExecution, ChangeTask, InsertTask
from scriptdispatch.domain.model import (
    RUNNING,
    UNDER_WAY,
    Error,
    Execution,
    History,
    LogLine,
    Quarantined,
    Retry,
    Script,
    StoredLine,
    Task,
    Token,
)
from scriptdispatch.store.port import Document, Remembered
from scriptdispatch.store.summary import HISTORY_KEPT

T = TypeVar("T", bound=msgspec.Struct)
S = TypeVar("S")
Codec = Callable[[Any], Any]
Pipeline = list[Document]

TAIL: Final = 8  # characters of an id by which a person may name it
PER_STATEMENT: Final = 100  # documents of one statement: each looks its values up in a list of this length
PER_ALIKE: Final = 500  # of one where all get the same values
FEW: Final = 4  # different sets of values that a batch is parted into
HEAVY: Final = 2_000_000  # characters in one statement or insert; the server takes statements of 16 MB


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def label_text(name: str, value: str) -> str:
    """`name=value`; what would make it ambiguous is escaped in the name."""
    return f"{name.replace('%', '%25').replace('=', '%3D')}={value}"


def _label_pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.replace("%3D", "=").replace("%25", "%"), value


def _labels_out(labels: Mapping[str, str]) -> list[str]:
    return [label_text(name, value) for name, value in labels.items()]


def _labels_in(texts: Sequence[str]) -> dict[str, str]:
    return dict(map(_label_pair, texts))


def _error_out(error: Error) -> Document:
    return {"code": error.code, "message": error.message, "details": to_json(error.details)}


def _error_in(document: Document) -> Document:
    return {**document, "details": msgspec.json.decode(document["details"])}


_CODECS: Final[dict[Any, tuple[Codec, Codec]]] = {
    Error: (_error_out, _error_in),
    Retry: (msgspec.to_builtins, dict),
    dict[str, str]: (_labels_out, _labels_in),
    dict[str, Any]: (to_json, msgspec.json.decode),
    Any: (to_json, msgspec.json.decode),
}


def _plain(kind: Any) -> Any:
    """The type without its `| None`."""
    if get_origin(kind) in (Union, UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else Any
    return kind


def _default(field: Any) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


class Documents(Generic[T]):
    """One kind of record. `lean`: fields that are left out, too, where they have their default value."""

    def __init__(self, record: type[T], *, lean: Sequence[str] = ()) -> None:
        self.record = record
        fields = msgspec.structs.fields(record)
        self._keys = {field.name: "_id" if field.name == "id" else field.encode_name for field in fields}
        codecs = {field.name: _CODECS.get(_plain(field.type)) for field in fields}
        self._encode: dict[str, Codec | None] = {name: pair[0] if pair else None for name, pair in codecs.items()}
        self._decode = [(self._keys[name], pair[1]) for name, pair in codecs.items() if pair]
        self._plan = [(name, key, self._encode[name]) for name, key in self._keys.items()]
        self._required = [self._keys[field.name] for field in fields if field.required and field.name != "id"]
        self._defaults = {field.name: _default(field) for field in fields if field.name in lean}
        self._has_id = "id" in self._keys

    def to_document(self, record: T) -> Document:
        document: Document = {}
        for name, key, encode in self._plan:
            value = getattr(record, name)
            if value is None or (name in self._defaults and value == self._defaults[name]):
                continue
            document[key] = value if encode is None else encode(value)
        return document

    def from_document(self, document: Document) -> T:
        """Takes the document over: it is changed."""
        if self._has_id:
            document["id"] = document.pop("_id")
        for key, decode in self._decode:
            value = document.get(key)
            if value is not None:
                document[key] = decode(value)
        for key in self._required:
            document.setdefault(key, None)
        return msgspec.convert(document, self.record)

    def values(self, fields: Mapping[str, Any]) -> Document:
        """The fields of a change as they are stored. `_id` never changes."""
        return {self._keys[name]: self._value(name, value) for name, value in fields.items() if name != "id"}

    def expectation(self, expect: Mapping[str, Any]) -> Document:
        """As a filter. null matches what is absent, alone and in a list."""
        return {self._keys[name]: self._wanted(name, wanted) for name, wanted in expect.items()}

    def _wanted(self, name: str, wanted: Any) -> Any:
        several = wanted if isinstance(wanted, tuple) else (wanted,)
        values = [self._value(name, one) for one in several]
        if name in self._defaults and self._defaults[name] in several:
            values.append(None)  # it may have been left out
        return {"$in": values} if isinstance(wanted, tuple) or len(values) > 1 else values[0]

    def _value(self, name: str, value: Any) -> Any:
        encode = self._encode[name]
        return value if encode is None or value is None else encode(value)


TASK: Final = Documents(Task, lean=("secret_params", "labels", "retry"))
SCRIPT: Final = Documents(Script)
EXECUTION: Final = Documents(Execution, lean=("retryable", "log_lines", "log_dropped"))
HISTORY: Final = Documents(History, lean=("retry_count",))
QUARANTINE: Final = Documents(Quarantined)
REMEMBERED: Final = Documents(Remembered)
TOKEN: Final = Documents(Token)

# Ordinary reads of a task leave out what only this store looks at, and the history, which may be long.
TASK_FIELDS: Final[Document] = {"history": 0, "tail": 0, "unusual": 0, "op": 0}
EXECUTION_FIELDS: Final[Document] = {"op": 0, "op_stamp": 0, "op_close": 0, "op_lines": 0}


# What nearly all tasks have in common is in no index: each of them would pay for it, and nobody finds anything by it.
# Tasks that differ are found by the texts in `unusual`, which are made like those of labels. These fields never change.
USUAL: Final = {"type": "script", "priority": "normal"}


def unusual_texts(values: Mapping[str, str]) -> list[str]:
    return [label_text(name, values[name]) for name in USUAL if values.get(name, USUAL[name]) != USUAL[name]]


def task_document(insert: InsertTask) -> Document:
    """With its first history row: one document, one atomic insert."""
    document = TASK.to_document(insert.task)
    document["tail"] = insert.task.id[-TAIL:]
    if unusual := unusual_texts(document):
        document["unusual"] = unusual
    document["history"] = [history_document(insert.history, None)]
    return document


LINES_OF_BLOCK: Final = 100  # at most


def blocks(lines: Sequence[LogLine]) -> list[list[LogLine]]:
    """Each is of one execution, all its lines have numbers or none has. Each task's lines keep their order."""
    by_task: dict[str, list[list[LogLine]]] = {}
    for line in lines:
        runs = by_task.setdefault(line.task_id, [])
        if not runs or runs[-1][0].execution_id != line.execution_id or (runs[-1][0].seq is None) != (line.seq is None):
            runs.append([])
        runs[-1].append(line)
    return [part for runs in by_task.values() for run in runs for part in in_parts(run, _size, LINES_OF_BLOCK)]


def _size(line: LogLine) -> int:
    return len(line.content)


_FLAGS: Final = ("late", "truncated")  # the places of the lines that are


def block_document(block: Sequence[LogLine], cursor: int, at: datetime) -> Document:
    first = block[0]
    document: Document = {
        "_id": cursor,
        "n": len(block),
        "stored_at": at,
        "task_id": first.task_id,
        "execution_id": first.execution_id,
        "times": [line.time for line in block],
        "streams": [line.stream for line in block],
        "contents": [line.content for line in block],
    }
    if first.seq is not None:
        document["seqs"] = [line.seq for line in block]
    for flag in _FLAGS:
        if places := [i for i, line in enumerate(block) if getattr(line, flag)]:
            document[flag] = places
    return document


def block_lines(document: Document) -> list[StoredLine]:
    task_id, execution_id, cursor = document["task_id"], document["execution_id"], document["_id"]
    seqs = document.get("seqs") or [None] * document["n"]
    late, truncated = (frozenset(document.get(flag, ())) for flag in _FLAGS)
    lines = zip(seqs, document["times"], document["streams"], document["contents"], strict=True)
    return [
        StoredLine(
            cursor=cursor + i,
            line=LogLine(
                task_id=task_id, execution_id=execution_id, seq=seq, time=time, stream=stream, content=content,
                late=i in late, truncated=i in truncated,
            ),
        )
        for i, (seq, time, stream, content) in enumerate(lines)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ compare-and-set


class Cas(msgspec.Struct, frozen=True):
    """A change as it goes to the server: the document, what it must be like, what is written, and where the mark goes.

    The mark is the token of the write, left in the document by the write itself: whoever did not hear the answer reads it
    there, and a repeated statement passes over a document that has it. Where it lies decides how long it can be read:
    in the history row (500 rows long), in `op_close` (a row is closed once: for ever), in `op_stamp` (until the same worker
    stamps again), else in `op` (until the next change of that kind, all of which may be repeated without harm)."""

    id: str
    expect: Document
    values: Document
    history: Document | None
    mark: str
    add: Mapping[str, int] = {}  # to the numbers of these fields


class CountedClose(ChangeExecution, frozen=True, kw_only=True):
    """K1 together with the count of the lines that came with it: the row is written once."""

    lines: int
    dropped: int


def task_cas(change: ChangeTask) -> Cas:
    history = None if change.history is None else history_document(change.history, _under_way(change))
    mark = "op" if history is None else "history.op"
    return Cas(change.task_id, TASK.expectation(change.expect), TASK.values(change.set), history, mark)


def execution_cas(change: ChangeExecution) -> Cas:
    values = EXECUTION.values(change.set)
    mark = "op_close" if values.get("active") is False else "op_stamp" if "sending_at" in values else "op"
    add = {"log_lines": change.lines, "log_dropped": change.dropped} if isinstance(change, CountedClose) else {}
    return Cas(change.execution_id, EXECUTION.expectation(change.expect), values, None, mark, add)


SAME_EXECUTION: Final = True  # in a stored history row: the execution that was started last
SAME_ACTOR: Final = True  # the worker is the one who did it
USUAL_KIND: Final = "STATE_CHANGE"  # left out


def _under_way(change: ChangeTask) -> str | None:
    """The execution that is certainly the one started last: the change expects the task to be under way with it."""
    status = change.expect.get("status")
    expected = status if isinstance(status, tuple) else (status,)
    return change.expect.get("execution_id") if UNDER_WAY.issuperset(expected) else None


def history_document(row: History, under_way: str | None) -> Document:
    """A row about the execution that is under way does not repeat its id: the row of its start names it. So the rows of
    many tasks are alike, and their changes one statement. Short, for each later change writes all of them again."""
    document = HISTORY.to_document(row)
    if row.kind == USUAL_KIND:
        del document["kind"]
    if row.worker_id is not None and row.worker_id == row.actor:
        document["worker_id"] = SAME_ACTOR
    if row.execution_id is not None and row.execution_id == under_way:
        document["execution_id"] = SAME_EXECUTION
    return document


def history_rows(documents: Sequence[Document]) -> list[History]:
    """Oldest first, as they are stored. Of an execution whose start is no longer among them the id is not known."""
    rows: list[History] = []
    named: str | None = None
    for document in documents:
        if document.get("execution_id") is SAME_EXECUTION:
            document["execution_id"] = named
        if document.get("worker_id") is SAME_ACTOR:
            document["worker_id"] = document["actor"]
        document.setdefault("kind", USUAL_KIND)
        if document.get("to") == RUNNING:
            named = document.get("execution_id")
        rows.append(HISTORY.from_document(document))
    return rows


class Statement(msgspec.Struct, frozen=True):
    filter: Document
    update: Document | Pipeline
    ids: list[str]


def statements(changes: Sequence[Cas], token: ObjectId) -> list[Statement]:
    """As few as can be: those of one shape (same expectation but for the execution, same fields) share a statement; the
    cheapest if their values are the same, too. No document may appear twice."""
    groups: dict[Any, list[Cas]] = {}
    for change in changes:
        groups.setdefault(_shape(change), []).append(change)
    made: list[Statement] = []
    for group in groups.values():
        alike = _alike(group)
        if alike is not None:
            made += [_same(part, token) for same in alike for part in in_parts(same, _weight, PER_ALIKE)]
        else:
            made += [_by_document(part, token) for part in in_parts(group, _weight, PER_STATEMENT)]
    return made


def _alike(group: Sequence[Cas]) -> list[list[Cas]] | None:
    """Parted into those that write the same; None if that makes more than a few parts."""
    parts: list[list[Cas]] = []
    for change in group:
        for part in reversed(parts):
            if change.values == part[0].values and change.history == part[0].history and change.add == part[0].add:
                part.append(change)
                break
        else:
            if len(parts) == FEW:
                return None
            parts.append([change])
    return parts if len(parts) * 2 <= len(group) or len(group) == 1 else None


def in_parts(items: Sequence[S], weight: Callable[[S], int], most: int) -> list[list[S]]:
    """In their order; no part has more than `most`, nor weighs more than HEAVY unless it has one item."""
    parts: list[list[S]] = []
    room = 0
    for item in items:
        room -= weight(item)
        if not parts or room < 0 or len(parts[-1]) == most:
            parts.append([])
            room = HEAVY - weight(item)
        parts[-1].append(item)
    return parts


def _weight(change: Cas) -> int:
    """What a device sent; everything else is short."""
    return len(change.values.get("result") or "") + len(change.values.get("reason") or "")


def _shape(change: Cas) -> Any:
    """An execution id belongs to one task, so two lists of ids compare as exactly as pairs would (PROTOCOL, "In batches").
    Everything else that is expected has to be the same for all."""
    expect = tuple((key, _frozen(value)) for key, value in change.expect.items() if not _is_pair(key, value))
    paired = _is_pair("execution_id", change.expect.get("execution_id"))
    return (change.mark, expect, paired, tuple(change.values), tuple(change.add))


def _is_pair(key: str, value: Any) -> bool:
    return key == "execution_id" and isinstance(value, str)


def _frozen(value: Any) -> Any:
    return repr(value) if isinstance(value, dict | list) else (type(value), value)


def _match(group: Sequence[Cas], token: ObjectId) -> Document:
    first, ids = group[0], [change.id for change in group]
    match: Document = {**first.expect, "_id": {"$in": ids} if len(ids) > 1 else ids[0]}
    if len(ids) > 1 and _is_pair("execution_id", first.expect.get("execution_id")):
        match["execution_id"] = {"$in": [change.expect["execution_id"] for change in group]}
    match[first.mark] = {"$ne": token}
    return match


def _marked(change: Cas, token: ObjectId) -> tuple[Document, Document | None]:
    if change.history is not None:
        return change.values, {**change.history, "op": token}
    return {**change.values, change.mark: token}, None


def _same(group: Sequence[Cas], token: ObjectId) -> Statement:
    """All get the same values."""
    values, history = _marked(group[0], token)
    update: Document = {"$set": values} if values else {}
    if group[0].add:
        update["$inc"] = dict(group[0].add)
    if history is not None:
        update["$push"] = {"history": {"$each": [history], "$slice": -HISTORY_KEPT}}
    return Statement(_match(group, token), update, [change.id for change in group])


def _by_document(group: Sequence[Cas], token: ObjectId) -> Statement:
    """Each gets its own values, taken from a list by the place of its id: a third of the server's cost of a statement for
    each. All that comes from outside is inside `$literal`: a text like "$name" is a text."""
    marked = [_marked(change, token) for change in group]
    ids = [change.id for change in group]
    place: Document = {"$indexOfArray": [{"$literal": ids}, "$_id"]}

    def own(choices: Sequence[Any]) -> Document:
        if all(choice == choices[0] for choice in choices[1:]):
            return {"$literal": choices[0]}
        return {"$arrayElemAt": [{"$literal": list(choices)}, place]}

    stage = {field: own([values[field] for values, _ in marked]) for field in marked[0][0]}
    for field in group[0].add:
        stage[field] = {"$add": [{"$ifNull": [f"${field}", 0]}, own([change.add[field] for change in group])]}
    if group[0].history is not None:
        longer: Document = {"$concatArrays": [{"$ifNull": ["$history", []]}, [own([history for _, history in marked])]]}
        stage["history"] = {"$slice": [longer, -HISTORY_KEPT]}
    return Statement(_match(group, token), [{"$set": stage}], ids)
