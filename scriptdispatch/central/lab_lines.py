"""Bytes of a pipe to lines of text. Pure.

A line ends at a newline, at the end of the pipe, or at LONGEST bytes (a longer one comes in pieces). What is not UTF-8
becomes the replacement character, and so does NUL, which some stores cannot keep.
"""

import re
from typing import Final

LONGEST: Final = 64 * 1024
_PROGRESS: Final = re.compile(r"::progress[ \t]+(\d{1,3})%?(?:[ \t]+(.*))?")


class Lines:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        texts = [text for line in whole for text in _texts(line.removesuffix(b"\r"))]
        while len(self._rest) >= LONGEST:
            cut = _boundary(self._rest, LONGEST)
            texts += _texts(self._rest[:cut])
            self._rest = self._rest[cut:]
        return texts

    def end(self) -> list[str]:
        """The last line, if it has no newline."""
        rest, self._rest = self._rest, b""
        return _texts(rest) if rest else []


def progress(line: str) -> tuple[int, str | None] | None:
    """`::progress 40 unpacking` → (40, "unpacking"). None: an ordinary line."""
    match = _PROGRESS.fullmatch(line.rstrip())
    if match is None:
        return None
    return min(100, int(match.group(1))), match.group(2) or None


def _texts(line: bytes) -> list[str]:
    pieces = []
    while len(line) > LONGEST:
        cut = _boundary(line, LONGEST)
        pieces.append(line[:cut])
        line = line[cut:]
    pieces.append(line)
    return [text for piece in pieces for text in _fitting(piece.decode(errors="replace").replace("\x00", "\ufffd"))]


def _fitting(text: str) -> list[str]:
    """Replacement characters take three bytes each, so junk can outgrow the limit that its bytes kept."""
    if len(text) <= LONGEST // 4 or len(text.encode()) <= LONGEST:
        return [text]
    step = LONGEST // 4
    return [text[i : i + step] for i in range(0, len(text), step)]


def _boundary(data: bytes, at: int) -> int:
    """The place at or up to three bytes before `at` that does not cut a character of UTF-8."""
    for cut in range(at, at - 4, -1):
        if cut >= len(data) or data[cut] & 0xC0 != 0x80:
            return cut
    return at
