"""What the command line makes of texts, times and options, without a server."""

import io
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import typer

from scriptdispatch.cli import main, task_body
from scriptdispatch.cli.dev_part import ended, worth_saying
from scriptdispatch.cli.follow import Printer
from scriptdispatch.cli.remedies import remedy, short
from scriptdispatch.cli.screen import Cell, Column, Screen
from scriptdispatch.cli.session import Session
from scriptdispatch.cli.signs import LOOKS, clean, clean_line, look, plain
from scriptdispatch.cli.stats import sentences, sparkline
from scriptdispatch.cli.tables import cut, fit, layout
from scriptdispatch.cli.task_views import short_why
from scriptdispatch.cli.times import parse_span, parse_when, short_span, span_ms
from scriptdispatch.domain.model import STATUSES

NOW = datetime(2026, 11, 18, 14, 0, tzinfo=UTC)


def same(text: str) -> str:
    return text


def test_every_state_has_a_sign_a_word_and_an_ascii_form() -> None:
    assert set(LOOKS) == set(STATUSES)
    assert all(plain(sign).isascii() for sign, _, _ in LOOKS.values())
    assert len({plain(sign) for sign, _, _ in LOOKS.values()}) == len(LOOKS)


def test_an_unclear_push_is_shown_as_unclear() -> None:
    assert look("send_success", "unknown")[:2] == ("➤?", "Sent, unclear")


@pytest.mark.parametrize(
    "hostile",
    ["\x1b]0;title\x07", "\x1b[2J", "\x1b[10;10H", "\x1b]8;;http://x\x1b\\", "\x9b2J", "\x00", "\u202e", "\x1bc", "\x7f"],
)
def test_nothing_a_terminal_would_obey_gets_through(hostile: str) -> None:
    assert clean(f"a{hostile}b") == "ab"
    assert clean_line(f"a{hostile}b", colour=True) == "ab"
    assert clean_line(f"a{hostile}b", colour=False) == "ab"


def test_a_line_keeps_its_colours_only_where_colours_are_shown() -> None:
    assert clean_line("\x1b[31mred\x1b[0m", colour=True) == "\x1b[31mred\x1b[0m\x1b[0m"
    assert clean_line("\x1b[31mred\x1b[0m", colour=False) == "red"


def test_of_a_line_that_overwrites_itself_the_last_state_is_left() -> None:
    assert clean_line("10 %\r50 %\r100 %\r\n", colour=False) == "100 %"


def test_a_name_is_always_on_one_line() -> None:
    assert clean("two\nlines\tand a tab") == "two lines and a tab"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("30d", 2_592_000), ("200ms", 0.2)]
)
def test_spans_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5 parsecs", "1e9"])
def test_a_wrong_span_says_what_is_taken(text: str) -> None:
    with pytest.raises(ValueError, match="90s"):
        parse_span(text)


def test_times_are_absolute_or_from_now() -> None:
    assert parse_when("+5m", NOW) == NOW + timedelta(minutes=5)
    assert parse_when("2026-11-18T22:00:00+08:00", NOW) == NOW
    assert parse_when("2026-11-18T14:00:00Z", NOW) == NOW
    with pytest.raises(ValueError, match="is not a time"):
        parse_when("tomorrow", NOW)


def test_spans_are_written_short_and_exact() -> None:
    assert [short_span(s) for s in (0, 41, 120, 7300, 400_000)] == ["0 s", "41 s", "2 m", "2 h", "4 d"]
    assert [span_ms(ms) for ms in (None, 95, 4000, 72_000)] == ["–", "95 ms", "4.0 s", "1 m 12 s"]


def test_a_table_takes_from_the_widest_flexible_column_first() -> None:
    columns = [Column("ID"), Column("WHY", flexible=True), Column("NAME", flexible=True)]
    assert fit([8, 60, 20], columns, 60) == [8, 28, 20]
    assert fit([8, 10, 10], columns, 200) == [8, 10, 10]


def test_no_table_line_is_wider_than_the_terminal_and_wide_letters_count_twice() -> None:
    columns = [Column("ID"), Column("NAME", flexible=True)]
    rows = [[Cell("1", 1), Cell("重启边缘代理服务器重启边缘代理服务器", "x")]]
    lines = [line.plain for line in layout(columns, rows, 24, same)]
    assert lines[1] == "1   重启边缘代理服务器…"
    assert cut("abcdef", 4, same) == "abc…"


def test_why_names_place_and_holder() -> None:
    waiting = {
        "reason": "device",
        "task_id": "0198aaaa-0000-7000-8000-0000deadbeef",
        "position": 2,
        "details": {"holder_since": "2026-11-18T13:58:00.000Z"},
    }
    assert short_why({"waiting_for": waiting}, NOW) == "2nd in lane; …deadbeef (2 m)"


def test_why_of_a_failed_task_is_its_error() -> None:
    assert short_why({"waiting_for": None, "error": {"code": "TIMEOUT"}}, NOW) == "TIMEOUT"


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        ({"status": 401, "code": "unauthorized"}, 3),
        ({"status": 403, "code": "forbidden"}, 3),
        ({"status": 404, "code": "task_not_found"}, 4),
        ({"status": 422, "code": "device_not_found"}, 4),
        ({"status": 409, "code": "duplicate_task"}, 5),
        ({"status": 409, "code": "illegal_state"}, 5),
        ({"status": 422, "code": "idempotency_mismatch"}, 5),
        ({"status": 422, "code": "validation_error"}, 2),
        ({"status": 422, "code": "invalid_script"}, 2),
        ({"status": 413, "code": "payload_too_large"}, 2),
        ({"status": 429, "code": "too_many_requests"}, 1),
        ({"status": 500, "code": "internal_error"}, 1),
        ({"status": 503, "code": "central_unavailable"}, 1),
        ({"status": 0, "code": "unreachable"}, 6),
        ({"status": 0, "code": "time_over"}, 124),
    ],
)
def test_each_problem_has_its_exit_code(problem: dict[str, object], code: int) -> None:
    assert main.exit_code(problem) == code


def test_a_problem_is_one_line_that_names_the_field_once() -> None:
    one = {"code": "x", "detail": "no such device", "errors": [{"field": "device_id", "message": "no such device"}]}
    assert main.sentence(one) == "device_id: no such device"
    two = {"code": "x", "detail": "wrong.", "errors": [{"field": "a", "message": "b"}, {"field": "c", "message": "d"}]}
    assert main.sentence(two) == "wrong (a: b; c: d)"
    assert "\n" not in main.sentence({"detail": "two\nlines"})


def test_the_language_is_guessed_from_suffix_then_from_the_first_line() -> None:
    assert task_body.guess_language("fix.sh", "") == "shell"
    assert task_body.guess_language("fix.PY", "#!/bin/sh") == "python"
    assert task_body.guess_language("fix", "#!/usr/bin/env python3\n") == "python"
    assert task_body.guess_language("-", "#!/bin/bash -eu\n") == "shell"
    for file, text in (("fix.rb", "puts 1"), ("fix", "true"), (None, "#!/usr/bin/env perl\n")):
        with pytest.raises(typer.BadParameter, match="--language"):
            task_body.guess_language(file, text)


def test_a_text_without_a_file_is_shell_unless_its_first_line_says_otherwise() -> None:
    for file in (None, "-"):
        assert task_body.guess_language(file, "uptime") == "shell"
        assert task_body.guess_language(file, "#!/usr/bin/env -S python3 -u\n") == "python"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_bar_is_filled_to_its_end_and_never_shows_a_step_with_the_number_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Printer(Session(Screen())) as printer:
        printer.advance(60, "unpacking")
        assert "unpacking  60 %" in terminal.getvalue()
        assert "unpacking   0 %" not in terminal.getvalue()
        printer.advance(100, "done")
        assert "done 100 % \x1b[32m━" in terminal.getvalue(), "green, unlike the grey of what is left"


@pytest.mark.parametrize(
    ("locale", "utf8"),
    [
        ({}, True),
        ({"LC_ALL": "C"}, False),
        ({"LANG": "POSIX"}, False),
        ({"LC_ALL": "de_DE.ISO-8859-1", "LANG": "en_US.UTF-8"}, False),
        ({"LC_ALL": "en_US.UTF-8", "LANG": "C"}, True),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True),
    ],
)
def test_signs_are_ascii_where_the_locale_is(locale: dict[str, str], utf8: bool) -> None:
    """In a process of its own: Python's UTF-8 mode, and what it puts into LC_CTYPE, begin with the process."""
    command = [sys.executable, "-c", "from scriptdispatch.cli.screen import Screen; Screen().done('x')"]
    done = subprocess.run(command, env={**locale, "PYTHONPATH": os.getcwd()}, capture_output=True, check=True)
    assert done.stdout.decode() == ("✓ x\n" if utf8 else "+ x\n")


def test_params_are_text_unless_they_are_json() -> None:
    values, hidden = task_body.params(["a=1", "b:=[1,2]", "c=x=y"], ["pw=s3cret"])
    assert values == {"a": "1", "b": [1, 2], "c": "x=y", "pw": "s3cret"}
    assert hidden == ["pw"]
    for wrong in (["novalue"], ["n:=not json"], ["=x"]):
        with pytest.raises(typer.BadParameter, match="--param"):
            task_body.params(wrong, None)


def test_stats_are_two_lines_also_when_nothing_has_happened() -> None:
    assert sentences({})[1] == "nothing has finished yet"
    found = {
        "counts": {"waiting": 1204},
        "oldest_waiting_seconds": 41.2,
        "finished": {"success": 99, "failed": 1},
        "failure_rate": 0.01,
        "per_minute": [{"at": "x", "succeeded": 1, "failed": 0}, {"at": "y", "succeeded": 7, "failed": 1}],
        "wait_ms": {"p50": 1200, "p95": 40_000},
    }
    counts, speed = sentences(found)
    assert counts.startswith("waiting 1,204 (oldest 41 s) · ")
    assert counts.endswith("99.0 % succeed")
    assert speed == "finished/min ▂█ 8  wait 1.2 s/40 s"


def test_a_sparkline_uses_the_whole_height() -> None:
    assert sparkline([0, 4, 8]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"


def test_of_a_parts_log_only_warnings_and_foreign_words_reach_the_terminal() -> None:
    assert worth_saying('{"event": "node is ready", "level": "info"}') is None
    assert worth_saying('{"event": "it fell", "level": "error", "room": "x", "why": "y"}') == "error: it fell why=y"
    assert worth_saying("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert worth_saying("   ") is None
    assert ended(-9) == "was ended by SIGKILL"
    assert ended(1) == "ended with exit code 1"


@pytest.mark.parametrize(
    ("fault", "text", "advice"),
    [
        (
            "MongoDB does not answer: db:1: [Errno 111] Connection refused (configured timeouts: socketTimeoutMS: 20000.0ms)"
            ", Timeout: 5.0s, Topology Description: <TopologyDescription id: 6",
            "MongoDB does not answer: db:1: [Errno 111] Connection refused",
            "start the server, or set X_URL",
        ),
        (
            "MongoDB refused it: cannot use 'j' option when a host does not have journaling enabled, full error: {'ok': 0",
            "MongoDB refused it: cannot use 'j' option when a host does not have journaling enabled",
            "start mongod with its journal",
        ),
        (
            "MongoDB does not answer: Authentication failed., full error: {'ok'",
            None,
            "the right user and password into X_URL",
        ),
        ("Redis refuses the user or password in queue_url: WRONGPASS", None, "the right user and password into X_URL"),
        ("Redis is not reachable: Error 111", None, "start the server, or set X_URL"),
        ("Pulsar at b:6650 cannot be reached (Pulsar error: ConnectError)", None, "start the server, or set X_URL"),
        ("store_url: MongoDB 4.4.1 is too old: 6.0 or newer is needed", None, "update the server"),
        ("", "", "start the server, or set X_URL"),
    ],
)
def test_doctor_says_of_a_server_what_is_wrong_without_the_drivers_own_affairs(
    fault: str, text: str | None, advice: str
) -> None:
    assert short(fault) == (fault.partition(", full error")[0] if text is None else text)
    assert advice in remedy("mongodb://x", "X_URL", fault)


def test_a_fault_that_says_what_to_do_gets_no_second_line() -> None:
    assert remedy("redis://x", "X_URL", "queue_url: ... set it to noeviction (CONFIG SET maxmemory-policy noeviction)") == ""
