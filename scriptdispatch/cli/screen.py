"""Where commands write: data on stdout, all else on stderr; for people on a terminal, tab-separated when piped."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from scriptdispatch.cli.signs import look, plain

if TYPE_CHECKING:
    from rich.console import Console

ColorChoice = Literal["auto", "always", "never"]


class Cell(NamedTuple):
    """One field of a table: as people see it, as programs get it, in which style."""

    text: str
    raw: Any
    style: str = ""


class Column(NamedTuple):
    title: str
    right: bool = False
    flexible: bool = False  # is cut first when the terminal is too narrow


@dataclass(frozen=True, slots=True)
class Screen:
    json: bool = False
    color: ColorChoice = "auto"
    utc: bool = False

    # --- what kind of place this is

    @property
    def live(self) -> bool:
        """Somebody is looking: stdout is a terminal and not asked for JSON."""
        return sys.stdout.isatty() and not self.json and os.environ.get("TERM") != "dumb"

    @property
    def people(self) -> bool:
        return sys.stdout.isatty() and not self.json

    @property
    def coloured(self) -> bool:
        return self._coloured(sys.stdout)

    def _coloured(self, file: TextIO) -> bool:
        if self.color != "auto":
            return self.color == "always"
        return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def console(self, file: TextIO | None = None) -> "Console":
        from rich.console import Console

        file = file or sys.stdout
        coloured = self._coloured(file)
        return Console(
            file=file,
            force_terminal=True if coloured or file.isatty() else None,
            color_system="auto" if coloured and file.isatty() else "standard" if coloured else None,
            no_color=not coloured,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    # --- lines

    def line(self, text: str = "", style: str = "") -> None:
        self._write(sys.stdout, text, style)

    def note(self, text: str, style: str = "") -> None:
        """Something beside the data."""
        self._write(sys.stderr, text, style)

    def done(self, text: str) -> None:
        """The one stable line of a command that changed something."""
        self.signed("✓", "green", text)

    def signed(self, sign: str, style: str, text: str) -> None:
        self.parts((sign, style), (f" {text}", ""))

    def parts(self, *parts: tuple[str, str]) -> None:
        """One line of pieces with a style each."""
        if not self.coloured:
            self.line("".join(text for text, _ in parts))
            return
        from rich.text import Text

        line = Text.assemble(*((self.own(text), style) for text, style in parts))
        self.console().print(line, soft_wrap=True)

    def _write(self, file: TextIO, text: str, style: str) -> None:
        text = self.own(text)
        if not style or not self._coloured(file):
            file.write(text + "\n")
            file.flush()
            return
        from rich.text import Text

        self.console(file).print(Text(text, style=style), soft_wrap=True)

    def state(self, status: str, push: str | None = None) -> tuple[str, str]:
        sign, word, style = look(status, push)
        return self.own(f"{sign} {word}"), style

    def own(self, text: str) -> str:
        """Text as this terminal can show it."""
        return text if utf8() else plain(text)

    # --- data

    def document(self, value: Any) -> None:
        """The API's JSON; indented when somebody is looking."""
        sys.stdout.write(json.dumps(value, ensure_ascii=not utf8(), indent=2 if sys.stdout.isatty() else None) + "\n")
        sys.stdout.flush()

    def json_line(self, value: Any) -> None:
        """One of many, each on its line at once."""
        sys.stdout.write(json.dumps(value, ensure_ascii=not utf8(), separators=(",", ":")) + "\n")
        sys.stdout.flush()

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, empty: str) -> None:
        """For people a table cut to the terminal; piped, tab-separated raw values without a head. Without rows, `empty`
        says so (and what to do) beside the data."""
        if not self.people:
            for row in rows:
                sys.stdout.write("\t".join(_raw(cell.raw) for cell in row) + "\n")
            sys.stdout.flush()
            return
        if not rows:
            self.note(empty)
            return
        from scriptdispatch.cli.tables import layout

        console = self.console()
        for line in layout(columns, rows, console.width, self.own):
            console.print(line, soft_wrap=True)


def utf8() -> bool:
    """stdout's encoding alone does not tell: in the locale C Python writes UTF-8 all the same."""
    return _is_utf8(getattr(sys.stdout, "encoding", None) or "") and _is_utf8(_locale() or "utf8")


def _locale() -> str:
    """What the person has set; "" for nothing at all. In its UTF-8 mode Python itself puts C.UTF-8 into LC_CTYPE."""
    own = os.environ.get("LC_CTYPE", "")
    if sys.flags.utf8_mode and own == "C.UTF-8":
        own = ""
    return os.environ.get("LC_ALL") or own or os.environ.get("LANG", "")


def _is_utf8(name: str) -> bool:
    return name.lower().replace("-", "").split("@")[0].endswith("utf8")


def _raw(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(str(value).split())
