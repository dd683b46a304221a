"""What an answer to a push means: the outcome table of SPEC section 5, row by row. Pure; `now` is an argument."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from scriptdispatch.central.http_link import ConnectFailed, Misconfigured, NotSent, Response, Trouble

Verdict = Literal["taken", "unknown", "not_sent", "refused", "device_gone", "device_busy", "wait", "misconfigured"]
WAIT_UNLESS_SAID_S: Final = 5.0
SHORTEST_WAIT_S: Final = 1.0  # "0" or a date in the past must not become a hot loop
LONGEST_WAIT_S: Final = 3600.0
EXCERPT: Final = 200  # characters of a foreign body that go into a message


class PushAnswer(Struct, frozen=True, kw_only=True):
    """What became of one push.

    `not_sent` is retryable, lock released: nothing left, or (with `http_status`) a 5xx that the settings call a refusal.
    `refused` and `device_gone` are final. `wait` and `misconfigured` are handed back at no cost. After `unknown` nobody
    may push this execution again, unless central control deduplicates.
    """

    outcome: Verdict
    message: str
    http_status: int | None = None
    retry_after_s: float | None = None  # only with `wait`
    holder: str | None = None  # only with `device_busy`: the execution that central control named
    connect_failed: bool = False  # no connection at all: what the breaker counts


def judge(
    came: Response | Trouble,
    *,
    execution_id: str,
    now: datetime,
    in_doubt: bool = False,
    five_xx_means_refused: bool = False,
) -> PushAnswer:
    """`in_doubt`: an earlier push of this execution ended unknown. Then only 2xx and 409 say anything about it; a later
    connect error, 4xx or 429 does not prove that the first one failed."""
    if isinstance(came, Trouble):
        answer = _trouble(came)
    else:
        answer = _response(came, execution_id, now, five_xx_means_refused)
    says_something = not isinstance(came, Trouble) and (200 <= came.status < 300 or came.status == 409)
    if in_doubt and not says_something:
        message = f"an earlier push of this execution may have been taken; now: {answer.message}"
        return PushAnswer(
            outcome="unknown",
            message=message,
            http_status=answer.http_status,
            connect_failed=answer.connect_failed,
        )
    return answer


def _trouble(trouble: Trouble) -> PushAnswer:
    if isinstance(trouble, Misconfigured):
        return PushAnswer(outcome="misconfigured", message=str(trouble))
    if isinstance(trouble, ConnectFailed):
        return PushAnswer(outcome="not_sent", message=str(trouble), connect_failed=True)
    if isinstance(trouble, NotSent):
        return PushAnswer(outcome="not_sent", message=str(trouble))
    return PushAnswer(outcome="unknown", message=f"the push was sent, but {trouble}")


def _response(response: Response, execution_id: str, now: datetime, five_xx_means_refused: bool) -> PushAnswer:
    status = response.status
    if 200 <= status < 300:
        return _taken(response, execution_id)
    if status == 409:
        return _conflict(response, execution_id)
    if status == 404:
        return _says("device_gone", response, "central control does not know the device")
    if 300 <= status < 400:
        return _says("misconfigured", response, f"central control redirects to {_location(response)}, which is not followed")
    if status in (401, 403):
        return _says("misconfigured", response, "central control does not accept our token")
    if status in (425, 429):
        return _wait(response, retry_after_s(response, now) or WAIT_UNLESS_SAID_S)
    if status == 408:
        return _says("unknown", response, "central control ran out of time over the request")
    if 400 <= status < 500:
        return _says("refused", response, "central control refused the script")
    if status == 503 and (wait_s := retry_after_s(response, now)) is not None:
        return _wait(response, wait_s)
    if 500 <= status < 600 and five_xx_means_refused:
        return _says("not_sent", response, "central control failed and did not take the script")
    return _says("unknown", response, "central control may or may not have taken the script")


def _taken(response: Response, execution_id: str) -> PushAnswer:
    named = _named(response)
    if named is not None and named != execution_id:
        return _says("unknown", response, f"central control answered for another execution ({named[:100]})")
    return PushAnswer(outcome="taken", message="taken by central control", http_status=response.status)


def _conflict(response: Response, execution_id: str) -> PushAnswer:
    named = _named(response)
    if not response.body.strip() or named == execution_id:
        return PushAnswer(outcome="taken", message="central control has this execution already", http_status=409)
    if named is None:
        # It names nobody: neither "I have yours" nor "another has the device" can be read out of it. Only unknown is safe.
        return _says("unknown", response, "central control reports a conflict, but not with whom")
    message = f"the device is busy there with execution {named[:100]}"
    return PushAnswer(outcome="device_busy", message=message, http_status=409, holder=named[:200])


def _wait(response: Response, wait_s: float) -> PushAnswer:
    message = f"central control asked to wait {wait_s:g} s (HTTP {response.status})"
    return PushAnswer(outcome="wait", message=message, http_status=response.status, retry_after_s=wait_s)


def _says(outcome: Verdict, response: Response, sentence: str) -> PushAnswer:
    text = " ".join(response.body[: EXCERPT * 4].decode(errors="replace").split())[:EXCERPT]
    text = "".join(sign for sign in text if sign.isprintable())
    message = f"{sentence} (HTTP {response.status}{': ' + text if text else ''})"
    return PushAnswer(outcome=outcome, message=message, http_status=response.status)


def _named(response: Response) -> str | None:
    """The execution that the body names, if it is a JSON object that does."""
    if response.truncated or not response.body:
        return None
    try:
        body: Any = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, RecursionError):
        return None
    named = body.get("execution_id") if isinstance(body, dict) else None
    return named if isinstance(named, str) else None


def _location(response: Response) -> str:
    return repr(response.headers.get("location", "nowhere")[:EXCERPT])


def retry_after_s(response: Response, now: datetime) -> float | None:
    """`Retry-After` in seconds or as an HTTP date, within [1 s, 1 h]. None: absent or unreadable."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        wait_s = float(text[:9])
    else:
        try:
            at = parsedate_to_datetime(text)
        except (ValueError, IndexError):
            return None
        wait_s = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    return min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, wait_s))
