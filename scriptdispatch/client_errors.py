"""What the client raises."""

from typing import Any

from scriptdispatch.errors import ScriptdispatchError

Json = dict[str, Any]


class ClientError(ScriptdispatchError):
    """Everything the client raises."""


class ApiError(ClientError):
    """The API refused. `problem` is its answer (RFC 9457); `code` the word for programs."""

    def __init__(self, problem: Json) -> None:
        self.problem = problem
        self.status = int(problem.get("status") or 500)
        self.code = str(problem.get("code") or "error")
        super().__init__(str(problem.get("detail") or problem.get("title") or self.code))

    @property
    def fields(self) -> list[tuple[str, str]]:
        return [(str(row.get("field")), str(row.get("message"))) for row in self.problem.get("errors") or []]


class Unreachable(ClientError):
    """No answer from the server, or none that we understand. What was asked may or may not have been done; a create can
    be repeated with the same Idempotency-Key."""


class WaitTimeout(ClientError):
    """The time given to `wait` or `follow` is over. The task goes on."""
