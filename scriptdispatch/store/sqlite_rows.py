"""Between records and rows: one column per field. Times are INTEGER milliseconds, structures are JSON text.

Also makes the text of compare-and-set updates, once per shape, so that SQLite prepares each of them once.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from types import UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from scriptdispatch.domain.model import Execution, History, LogLine, Quarantined, Script, Task, Token
from scriptdispatch.sqlite import Connection
from scriptdispatch.store.port import Remembered

T = TypeVar("T", bound=msgspec.Struct)
Row = Sequence[Any]
Codec = Callable[[Any], Any]


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def to_ms(at: datetime) -> int:
    """Exact: through a float, a time two centuries ahead would come back a microsecond off and be expected in vain."""
    return (at - _EPOCH) // _MS


def from_ms(ms: int) -> datetime:
    return _EPOCH + ms * _MS


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def fetch(db: Connection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    """All rows. A cursor that is left half read would keep its snapshot, and the WAL file could not shrink."""
    return db.execute(sql, values).fetchall()


class Table(Generic[T]):
    """The columns of one kind of record."""

    def __init__(self, name: str, record: type[T]) -> None:
        self.name, self.record = name, record
        fields = msgspec.structs.fields(record)
        self.columns: tuple[str, ...] = tuple(field.name for field in fields)
        self.select: str = ", ".join(self.columns)
        self.places: str = ", ".join("?" * len(fields))
        self.ddl: str = ", ".join(f"{field.name} {_affinity(field.type)}" for field in fields)
        self._values: Callable[[T], tuple[Any, ...]] = attrgetter(*self.columns)
        self._encoders: dict[str, Codec | None] = {field.name: _encoder(field.type) for field in fields}
        self._encode = [(i, codec) for i, codec in enumerate(self._encoders.values()) if codec]
        self._decode = [(i, codec) for i, field in enumerate(fields) if (codec := _decoder(field.type))]
        self._updates: dict[tuple[Any, ...], str] = {}

    def addition(self, column: str) -> str:
        """The column as it is added to a table of an older version: rows that are there get the field's default."""
        field = next(field for field in msgspec.structs.fields(self.record) if field.name == column)
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()  # msgspec keeps `{}` and `[]` as factories
        else:
            default = None if field.default is msgspec.NODEFAULT else field.default
        value = self._value(column, default)
        kind = _affinity(field.type)
        if value is None:
            return f"{column} {kind}"
        quoted = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else int(value)
        return f"{column} {kind} DEFAULT {quoted}"

    def row(self, record: T) -> list[Any]:
        """The values in the order of the columns."""
        values = list(self._values(record))
        for i, encode in self._encode:
            if values[i] is not None:
                values[i] = encode(values[i])
        return values

    def from_row(self, row: Row) -> T:
        values = list(row)
        for i, decode in self._decode:
            if values[i] is not None:
                values[i] = decode(values[i])
        return self.record(**dict(zip(self.columns, values, strict=True)))

    def decode_one(self, column: str, value: Any) -> Any:
        decode = dict(self._decode).get(self.columns.index(column))
        return value if decode is None or value is None else decode(value)

    def update(self, id: str, expect: Mapping[str, Any], set: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """A compare-and-set of one row: the statement and its values."""
        values = [self._value(name, value) for name, value in set.items()]
        values.append(id)
        shape: list[Any] = []
        for name, wanted in expect.items():
            if wanted is None:
                shape.append((name, None))
            elif isinstance(wanted, tuple):
                present = [self._value(name, value) for value in wanted if value is not None]
                shape.append((name, len(present), len(present) < len(wanted)))
                values += present
            else:
                shape.append(name)
                values.append(self._value(name, wanted))
        key = (*set, None, *shape)
        sql = self._updates.get(key)
        if sql is None:
            sql = self._updates[key] = self._update_text(set, shape)
        return sql, values

    def _value(self, name: str, value: Any) -> Any:
        encode = self._encoders[name]
        return value if encode is None or value is None else encode(value)

    def _update_text(self, set: Mapping[str, Any], shape: Sequence[Any]) -> str:
        changes = ", ".join(f"{name}=?" for name in set) or "id=id"
        wanted = "".join(f" AND {_condition(part)}" for part in shape)
        return f"UPDATE {self.name} SET {changes} WHERE id=?{wanted}"


def _condition(part: Any) -> str:
    if isinstance(part, str):
        return f"{part}=?"
    if part[1] is None:
        return f"{part[0]} IS NULL"
    name, count, or_null = part
    listed = f"{name} IN ({', '.join('?' * count)})"
    return f"({listed} OR {name} IS NULL)" if or_null else listed


def _plain(kind: Any) -> Any:
    """The type without its `| None`."""
    if get_origin(kind) in (Union, UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else Any
    return kind


def _is_json(kind: Any) -> bool:
    return kind is Any or get_origin(kind) in (dict, list) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def _affinity(kind: Any) -> str:
    kind = _plain(kind)
    if kind in (int, bool, datetime):
        return "INTEGER"
    if kind is bytes:
        return "BLOB"
    if kind is str or get_origin(kind) is Literal or _is_json(kind):
        return "TEXT"
    raise TypeError(f"no column for a field of type {kind}")


def _encoder(kind: Any) -> Codec | None:
    kind = _plain(kind)
    if kind is datetime:
        return to_ms
    return to_json if _is_json(kind) else None


def _decoder(kind: Any) -> Codec | None:
    kind = _plain(kind)
    if kind is datetime:
        return from_ms
    if kind is bool:
        return bool
    return msgspec.json.Decoder(kind).decode if _is_json(kind) else None


TASK: Final = Table("script_task", Task)
SCRIPT: Final = Table("script_code", Script)
EXECUTION: Final = Table("task_execution", Execution)
HISTORY: Final = Table("task_history", History)
LOG: Final = Table("task_exec_log", LogLine)
QUARANTINE: Final = Table("quarantine", Quarantined)
REMEMBERED: Final = Table("idempotency", Remembered)
TOKEN: Final = Table("token", Token)
