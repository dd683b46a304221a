"""Foreign errors become ours here: one table of what each error of the driver says about the operation it ended."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

from bson.errors import BSONError
from pymongo import errors

from scriptdispatch.errors import ScriptdispatchError, SettingsError, StoreUnavailable


class Said(Enum):
    """What an error says about the operation."""

    NOT_DONE = "it was never sent, or turned away whole; the server may take it later"
    UNCLEAR = "it may have been done, in part or whole, or may still be"
    REFUSED = "it will never be done like this: a limit, or a bug of ours"
    SETTINGS = "the address or an option in it is wrong"


# First match counts, so the special stand before the general (each is a PyMongoError).
TABLE: Final[tuple[tuple[type[Exception], Said], ...]] = (
    (errors.ServerSelectionTimeoutError, Said.NOT_DONE),  # on a driver's repeat it raises the first error instead
    (errors.WaitQueueTimeoutError, Said.NOT_DONE),
    (errors.NotPrimaryError, Said.UNCLEAR),  # a primary that steps down within a statement has done a part of it
    (errors.ConnectionFailure, Said.UNCLEAR),
    (errors.WriteConcernError, Said.UNCLEAR),  # done here, not yet by a majority
    (errors.ExecutionTimeout, Said.UNCLEAR),
    (errors.CursorNotFound, Said.NOT_DONE),
    (errors.ProtocolError, Said.UNCLEAR),
    (errors.EncryptionError, Said.REFUSED),
    (errors.ConfigurationError, Said.SETTINGS),
    (errors.InvalidName, Said.SETTINGS),
    (errors.CollectionInvalid, Said.REFUSED),
    (errors.DocumentTooLarge, Said.REFUSED),
    (errors.InvalidOperation, Said.NOT_DONE),  # the client was closed
    (errors.OperationFailure, Said.REFUSED),  # unless its code is one of the below
    (BSONError, Said.REFUSED),
    (errors.PyMongoError, Said.UNCLEAR),
)

# Codes of answers (https://www.mongodb.com/docs/manual/reference/error-codes/) that say something else than "refused".
CODES: Final[Mapping[int, Said]] = {
    **dict.fromkeys((6, 7, 89, 9001), Said.UNCLEAR),  # the network behind a mongos
    **dict.fromkeys((50, 64, 262), Said.UNCLEAR),  # out of time; no majority in time
    **dict.fromkeys((91, 189, 10058, 10107, 11600, 11602, 13435, 13436), Said.UNCLEAR),  # shutting down, stepping down
    **dict.fromkeys((63, 133, 134, 150, 13388, 234), Said.UNCLEAR),  # shards being moved or not ready
    **dict.fromkeys((46, 112, 202, 225, 251, 290, 14031), Said.UNCLEAR),  # overloaded, in conflict, disk full
    **dict.fromkeys((13, 18), Said.NOT_DONE),  # not allowed in: an operator can mend it
}
DUPLICATE_KEY: Final = 11000
TRANSLATED: Final = (errors.PyMongoError, BSONError)


def said(error: Exception) -> Said:
    """What the error says of the operation. Of several errors in one answer the least certain counts."""
    if isinstance(error, errors.BulkWriteError):
        return _said_of_bulk(error)
    if isinstance(error, errors.OperationFailure) and (error.code or 0) in CODES:
        return CODES[error.code or 0]
    return next(verdict for kind, verdict in TABLE if isinstance(error, kind))


def _said_of_bulk(error: errors.BulkWriteError) -> Said:
    details: Mapping[str, Any] = error.details or {}
    if details.get("writeConcernErrors"):
        return Said.UNCLEAR
    verdicts = {CODES.get(row.get("code", 0), Said.REFUSED) for row in details.get("writeErrors", ())}
    # In part done, in part turned away: as a whole it is unclear.
    return Said.REFUSED if verdicts <= {Said.REFUSED} else Said.UNCLEAR


def translated(error: Exception, *, writing: bool) -> ScriptdispatchError:
    """Ours. A read changes nothing, so its outcome is never unknown."""
    verdict = said(error)
    text = " ".join(str(error).split())[:300]
    if verdict is Said.SETTINGS:
        return SettingsError(f"store_url: {text}")
    if verdict is Said.REFUSED:
        return ScriptdispatchError(f"MongoDB refused it: {text}")
    return StoreUnavailable(f"MongoDB does not answer: {text}", outcome_unknown=writing and verdict is Said.UNCLEAR)


@contextmanager
def foreign_errors(*, writing: bool = False) -> Iterator[None]:
    """Around every call of the driver."""
    try:
        yield
    except TRANSLATED as error:
        raise translated(error, writing=writing) from error


def duplicates(error: errors.BulkWriteError) -> dict[int, tuple[str, ...]]:
    """Place in the batch → fields of the unique index that had it already. Raises the error if it says anything else."""
    details: Mapping[str, Any] = error.details or {}
    rows = details.get("writeErrors", ())
    if details.get("writeConcernErrors") or any(row.get("code") != DUPLICATE_KEY for row in rows):
        raise error
    return {row["index"]: tuple(row["keyPattern"]) for row in rows}
