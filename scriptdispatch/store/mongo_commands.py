"""Writes as plain commands, on the way that every task takes: inserts and compare-and-sets, many documents in one command.

Half the price of the driver's own bulk calls in our process, and less on the server: what its retryable writes leave in the
oplog and in the table of sessions is not needed, for the tokens make every one of these repeatable (`mongo_writes`). Answers
that report errors are raised as the driver's `BulkWriteError`, so that one table says what each means (`mongo_errors`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bson import encode
from bson.raw_bson import RawBSONDocument
from msgspec import Struct
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError

from scriptdispatch.store.mongo_errors import duplicates
from scriptdispatch.store.port import Document

Concern = Mapping[str, Any]
DURABLE: Final[Concern] = {"w": "majority", "j": True}
SOON: Final[Concern] = {"w": 1, "j": False}  # applied by the primary; durable with what it makes durable next
MOST: Final = 12_000_000  # bytes of documents in one command; the server takes 16 MB
Collection = AsyncCollection[Document]


class Updated(Struct, frozen=True):
    modified: int
    reign: bytes | None  # of the primary that answered; None: not a replica set, or several primaries answered


Refused = dict[int, tuple[str, ...]]  # places of documents that were there already, and the fields of the index that said so


class Inserted(Struct, frozen=True):
    refused: Refused
    reign: bytes | None


async def insert_new(collection: Collection, documents: Sequence[Document], concern: Concern = DURABLE) -> Inserted:
    """Inserts what can be."""
    refused: Refused = {}
    reigns: set[bytes | None] = set()
    begin = 0
    for part in _parts(documents):
        try:
            reigns.add(_reign(await _run(collection, "insert", "documents", part, concern)))
        except BulkWriteError as error:
            refused |= {begin + place: fields for place, fields in duplicates(error).items()}
            reigns.add(_reign(error.details))
        begin += len(part)
    return Inserted(refused, _only(reigns))


async def update(collection: Collection, statements: Sequence[Document]) -> Updated:
    """Each statement: `q`, `u`, `multi`, `hint`."""
    answers = [await _run(collection, "update", "updates", part, DURABLE) for part in _parts(statements)]
    return Updated(sum(answer["nModified"] for answer in answers), _only({_reign(answer) for answer in answers}))


def _only(reigns: set[bytes | None]) -> bytes | None:
    return reigns.pop() if len(reigns) == 1 else None


def _reign(answer: Mapping[str, Any]) -> bytes | None:
    """Each election has another. Within one, what was answered first stands first in the oplog: if the later of two writes
    survives, so does the earlier."""
    election = answer.get("electionId")
    return None if election is None else election.binary


async def _run(collection: Collection, verb: str, field: str, rows: Sequence[RawBSONDocument], concern: Concern) -> Document:
    command = {verb: collection.name, field: rows, "ordered": False, "writeConcern": concern}
    answer: Document = await collection.database.command(command)
    if "writeErrors" in answer or "writeConcernError" in answer:
        unclear = [answer["writeConcernError"]] if "writeConcernError" in answer else []
        raise BulkWriteError({"writeErrors": [], **answer, "writeConcernErrors": unclear})
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
