"""Every row of the outcome table of SPEC section 5."""

from datetime import UTC, datetime

import pytest

from scriptdispatch.central.http_link import Broken, ConnectFailed, Misconfigured, NotSent, Response, Trouble
from scriptdispatch.central.outcomes import PushAnswer, judge

OURS = "0190a5c0-0000-7000-8000-000000000001"
OTHER = "0190a5c0-0000-7000-8000-000000000002"
NOW = datetime(2026, 11, 18, 12, 0, 0, tzinfo=UTC)


def answer(status: int, body: bytes = b"", *, truncated: bool = False, **headers: str) -> Response:
    return Response(status, {name.replace("_", "-"): value for name, value in headers.items()}, body, truncated)


def judged(came: Response | Trouble, **how: bool) -> PushAnswer:
    return judge(came, execution_id=OURS, now=NOW, **how)


def names(execution_id: str) -> bytes:
    return b'{"execution_id": "%s"}' % execution_id.encode()


@pytest.mark.parametrize("trouble", [ConnectFailed("refused"), NotSent("closed"), NotSent("too late", vetoed=True)])
def test_without_a_byte_sent_it_is_certainly_not_sent(trouble: Trouble) -> None:
    assert judged(trouble).outcome == "not_sent"


def test_only_a_missing_connection_counts_as_a_connect_failure() -> None:
    assert judged(ConnectFailed("refused")).connect_failed
    assert not judged(NotSent("closed")).connect_failed
    assert not judged(Broken("reset")).connect_failed


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"whatever", b"[1]", names(OURS), b'{"execution_id": 7}', b'{"status": "ok"}', b"\xff\x00"]
)
@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_2xx_is_taken_whatever_its_body_says_unless_it_names_another(status: int, body: bytes) -> None:
    assert judged(answer(status, body)).outcome == "taken"


def test_a_2xx_with_a_body_too_long_to_read_is_taken() -> None:
    assert judged(answer(200, b"x" * 100, truncated=True)).outcome == "taken"


def test_a_2xx_that_names_another_execution_is_unknown() -> None:
    assert judged(answer(202, names(OTHER))).outcome == "unknown"


@pytest.mark.parametrize("body", [b"", b"  \r\n", names(OURS)])
def test_a_409_with_an_empty_body_or_naming_this_execution_is_taken(body: bytes) -> None:
    assert judged(answer(409, body)).outcome == "taken"


def test_a_409_naming_another_execution_is_a_busy_device_with_its_holder() -> None:
    busy = judged(answer(409, names(OTHER)))
    assert (busy.outcome, busy.holder, busy.http_status) == ("device_busy", OTHER, 409)


@pytest.mark.parametrize("body", [b"conflict", b"{}", b'{"error": "conflict"}'])
def test_a_409_that_names_nobody_is_unknown_because_nothing_else_is_safe(body: bytes) -> None:
    assert judged(answer(409, body)).outcome == "unknown"


def test_a_404_is_a_device_that_is_gone() -> None:
    assert judged(answer(404)).outcome == "device_gone"


@pytest.mark.parametrize("status", [400, 402, 405, 406, 410, 411, 412, 413, 415, 418, 422, 426, 428, 451, 499])
def test_other_4xx_are_refusals(status: int) -> None:
    refused = judged(answer(status, b'{"message": "no such language"}'))
    assert (refused.outcome, refused.http_status) == ("refused", status)
    assert "no such language" in refused.message


@pytest.mark.parametrize("status", [425, 429])
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 5.0),
        ("7", 7.0),
        ("0", 1.0),
        ("999999999999", 3600.0),
        ("Wed, 18 Nov 2026 12:00:30 GMT", 30.0),
        ("Wed, 18 Nov 2026 11:00:00 GMT", 1.0),
        ("soon", 5.0),
        ("-3", 5.0),
    ],
)
def test_425_and_429_ask_to_wait(status: int, header: str | None, seconds: float) -> None:
    wait = judged(answer(status, **({"retry_after": header} if header else {})))
    assert (wait.outcome, wait.retry_after_s) == ("wait", seconds)


def test_a_503_with_retry_after_asks_to_wait() -> None:
    wait = judged(answer(503, retry_after="2"), five_xx_means_refused=True)
    assert (wait.outcome, wait.retry_after_s, wait.http_status) == ("wait", 2.0, 503)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
def test_a_redirect_is_misconfigured_and_says_where_it_points(status: int) -> None:
    odd = judged(answer(status, location="http://169.254.169.254/"))
    assert odd.outcome == "misconfigured"
    assert "169.254.169.254" in odd.message


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_misconfigured(status: int) -> None:
    assert judged(answer(status)).outcome == "misconfigured"


def test_tls_and_dns_errors_are_misconfigured() -> None:
    assert judged(Misconfigured("certificate has expired")).outcome == "misconfigured"


@pytest.mark.parametrize("status", [408, 500, 501, 502, 503, 504, 599, 600, 199, 999])
def test_what_may_have_been_taken_is_unknown(status: int) -> None:
    assert judged(answer(status)).outcome == "unknown"


def test_trouble_after_the_first_byte_is_unknown() -> None:
    assert judged(Broken("reset by peer")).outcome == "unknown"


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_with_the_setting_a_5xx_is_retryable_and_not_unknown(status: int) -> None:
    failed = judged(answer(status), five_xx_means_refused=True)
    assert (failed.outcome, failed.http_status, failed.connect_failed) == ("not_sent", status, False)


@pytest.mark.parametrize(
    "came",
    [
        ConnectFailed("refused"),
        Misconfigured("dns"),
        NotSent("closed"),
        Broken("reset"),
        answer(404),
        answer(422),
        answer(429),
        answer(401),
        answer(302),
        answer(500),
        answer(503, retry_after="3"),
    ],
)
def test_in_doubt_nothing_but_2xx_and_409_says_anything(came: Response | Trouble) -> None:
    for means_refused in (False, True):
        assert judged(came, in_doubt=True, five_xx_means_refused=means_refused).outcome == "unknown"


def test_in_doubt_2xx_and_409_count() -> None:
    assert judged(answer(202), in_doubt=True).outcome == "taken"
    assert judged(answer(409, names(OURS)), in_doubt=True).outcome == "taken"
    assert judged(answer(409, names(OTHER)), in_doubt=True).outcome == "device_busy"


def test_a_foreign_body_is_cut_and_cleaned_before_it_gets_into_a_message() -> None:
    message = judged(answer(400, b"\x1b[31m" + b"x" * 100_000 + b"\n\x00")).message
    assert len(message) < 400
    assert message.isprintable()
