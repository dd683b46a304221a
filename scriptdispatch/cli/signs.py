"""The signs, words and colours of the console for a terminal, and how foreign text is made harmless there."""

import re
from typing import Final, NamedTuple


class Look(NamedTuple):
    sign: str
    word: str
    style: str


LOOKS: Final[dict[str, Look]] = {
    "waiting": Look("○", "Waiting", ""),
    "running": Look("◐", "Running", "blue"),
    "send_success": Look("➤", "Sent", "cyan"),
    "failed_waiting_retry": Look("↻", "Will retry", "yellow"),
    "paused": Look("‖", "Paused", "magenta"),
    "success": Look("✓", "Success", "green"),
    "failed": Look("✕", "Failed", "red"),
    "canceled": Look("⊘", "Canceled", "bright_black"),
}
# What people may type for a state, besides its own name.
STATUS_WORDS: Final = {"sent": "send_success", "retry": "failed_waiting_retry", "will_retry": "failed_waiting_retry"}

_ASCII: Final = str.maketrans(
    {"○": "o", "◐": "*", "➤": ">", "↻": "~", "‖": "=", "✓": "+", "✕": "x", "⊘": "-", "…": "...", "·": "-", "→": "->",
     "–": "-", "●": "*", "━": "=", "╸": ">", "▁": "_", "▂": ".", "▃": ".", "▄": "-", "▅": "-", "▆": "=", "▇": "=", "█": "#"}
)  # fmt: skip
# CSI sequences, OSC and the other string sequences up to their end, then any two-character escape.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[ -/]*[@-~]"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters but tab, and the marks that turn the direction of text around.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RESET: Final = "\x1b[0m"


def look(status: str, push: str | None = None) -> Look:
    if status == "send_success" and push == "unknown":
        return Look("➤?", "Sent, unclear", "cyan")
    return LOOKS.get(status) or Look("?", clean(status), "")


def plain(text: str) -> str:
    """Our own texts for a terminal that knows ASCII only."""
    return text.translate(_ASCII)


def clean(text: object) -> str:
    """Foreign text (names, messages) on one line, without anything a terminal would obey."""
    return _CONTROLS.sub("", _ESCAPES.sub("", str(text)).replace("\n", " ")).replace("\t", " ")


def clean_line(content: str, *, colour: bool) -> str:
    """A line of a script's output: its colours stay if wanted, whatever else would move the cursor or worse is removed.
    Of a line that overwrites itself with carriage returns, what it last showed is left."""
    content = content.rstrip("\r\n").rpartition("\r")[2]
    if not colour:
        return _CONTROLS.sub("", _ESCAPES.sub("", content))
    kept = _ESCAPES.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", content)
    pieces = _COLOUR.split(kept)
    codes = _COLOUR.findall(kept)
    text = "".join(_CONTROLS.sub("", piece) + code for piece, code in zip(pieces, [*codes, ""], strict=True))
    return text + RESET if codes else text
