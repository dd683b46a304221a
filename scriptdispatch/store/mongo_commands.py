"""Writes as plain commands, on the way that every task takes: inserts and compare-and-sets, many documents in one command.

Half the price of the driver's own bulk calls in our process, and less on the server: what its retryable writes leave in the
oplog and in the table of sessions is not needed, for the tokens make every one of these repeatable (`mongo_writes`). Answers
that report errors are raised as the driver's `BulkWriteError`, so that one table says what each means (`mongo_errors`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bson import encode
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError

from scriptdispatch.store.mongo_errors import duplicates
from scriptdispatch.store.port import Document

CONCERN: Final[Mapping[str, Any]] = {"w": "majority", "j": True}
MOST: Final = 12_000_000  # bytes of documents in one command; the server takes 16 MB
Collection = AsyncCollection[Document]


async def insert_new(collection: Collection, documents: Sequence[Document]) -> dict[int, tuple[str, ...]]:
    """Inserts what can be; answers the places of those that were there already, and the fields of the index that said so."""
    refused: dict[int, tuple[str, ...]] = {}
    begin = 0
    for part in _parts(documents):
        try:
            await _run(collection, "insert", "documents", part)
        except BulkWriteError as error:
            refused |= {begin + place: fields for place, fields in duplicates(error).items()}
        begin += len(part)
    return refused


async def update(collection: Collection, statements: Sequence[Document]) -> int:
    """How many documents were modified. Each statement: `q`, `u`, `multi`, `hint`."""
    return sum([(await _run(collection, "update", "updates", part))["nModified"] for part in _parts(statements)])


async def _run(collection: Collection, verb: str, field: str, rows: Sequence[RawBSONDocument]) -> Document:
    command = {verb: collection.name, field: rows, "ordered": False, "writeConcern": CONCERN}
    answer: Document = await collection.database.command(command)
    if "writeErrors" in answer or "writeConcernError" in answer:
        unclear = [answer["writeConcernError"]] if "writeConcernError" in answer else []
        raise BulkWriteError({"writeErrors": answer.get("writeErrors", []), "writeConcernErrors": unclear})
    return answer


def _parts(rows: Sequence[Document]) -> Iterator[list[RawBSONDocument]]:
    """In their order; no part is larger than MOST unless it has one row."""
    part: list[RawBSONDocument] = []
    size = 0
    for row in rows:
        raw = RawBSONDocument(encode(row))
        if part and size + len(raw.raw) > MOST:
            yield part
            part, size = [], 0
        part.append(raw)
        size += len(raw.raw)
    if part:
        yield part
