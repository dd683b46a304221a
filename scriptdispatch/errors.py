"""Our own errors. Foreign exceptions become these in the one file that imports their library."""

from collections.abc import Sequence
from typing import Any


class ScriptdispatchError(Exception):
    """Everything we raise on purpose."""


class SettingsError(ScriptdispatchError):
    """A setting is missing, unknown or wrong. The message names it and says what to do."""


class Unavailable(ScriptdispatchError):
    """A part we need does not answer now. Nothing was done; the same call may succeed later."""


class StoreUnavailable(Unavailable):
    """The store does not answer. With `outcome_unknown` the write may or may not have happened."""

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown


class QueueUnavailable(Unavailable):
    """Queue, locks or events do not answer. The store heals what was lost."""


class StreamUnavailable(Unavailable):
    """The stream of execution logs does not answer. Nothing was acknowledged."""


class CentralUnavailable(Unavailable):
    """Central control does not answer, or not in a way that we understand."""


class StaleTerm(ScriptdispatchError):
    """A write of a leader whose term is over. Nothing was written; it must step down."""


class WireError(ScriptdispatchError):
    """A message between master and child that cannot be read. The child is as good as dead."""


class Refused(ScriptdispatchError):
    """A request that cannot be done, as its sender gets to see it (RFC 9457): the same for API, CLI and console."""

    def __init__(self, status: int, code: str, detail: str, errors: Sequence[tuple[str, str]] = (), **extra: Any) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.extra = status, code, detail, extra
        self.errors = [{"field": field, "message": message} for field, message in errors]
