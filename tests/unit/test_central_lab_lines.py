from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.central.lab_lines import LONGEST, Lines, progress


def all_lines(*pieces: bytes) -> list[str]:
    lines = Lines()
    return [line for piece in pieces for line in lines.feed(piece)] + lines.end()


def test_lines_come_as_soon_as_they_are_complete() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\n\nthree") == ["two", ""]
    assert lines.end() == ["three"]
    assert lines.end() == []


def test_a_carriage_return_before_the_newline_is_no_part_of_the_line() -> None:
    assert all_lines(b"dos\r\nunix\n") == ["dos", "unix"]


def test_a_character_cut_by_the_pipe_is_whole_in_its_line() -> None:
    text = "grüße 你好".encode()
    for cut in range(len(text)):
        assert all_lines(text[:cut], text[cut:], b"\n") == ["grüße 你好"]


def test_junk_becomes_replacement_characters() -> None:
    assert all_lines(b"\xff\xfe\x00ok\n") == ["\ufffd\ufffd\ufffdok"]


def test_a_huge_line_comes_in_pieces_that_lose_nothing() -> None:
    text = "x" + "你" * 100_000
    pieces = all_lines(text.encode() + b"\nnext\n")
    assert "".join(pieces[:-1]) == text
    assert pieces[-1] == "next"
    assert all(len(piece.encode()) <= LONGEST for piece in pieces)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_however_the_pipe_cuts_it_the_lines_are_the_same(data: bytes, step: int) -> None:
    cut = [data[i : i + step] for i in range(0, len(data), step)]
    assert all_lines(*cut) == all_lines(data)


@given(st.binary(max_size=10), st.sampled_from([b"\xff", b"\x00", "你".encode(), "a你".encode()]), st.binary(max_size=10))
def test_no_piece_is_ever_longer_than_the_limit(start: bytes, middle: bytes, end: bytes) -> None:
    data = start + middle * (2 * LONGEST // len(middle)) + end
    assert all(len(piece.encode()) <= LONGEST for piece in all_lines(data))


def test_progress_lines() -> None:
    assert progress("::progress 40 unpacking the archive") == (40, "unpacking the archive")
    assert progress("::progress 100") == (100, None)
    assert progress("::progress 999 beyond") == (100, "beyond")
    assert progress("::progress x") is None
    assert progress(" ::progress 4") is None
    assert progress("::progression 4") is None
