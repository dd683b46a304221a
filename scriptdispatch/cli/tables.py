"""Tables for a terminal: columns as wide as needed, the flexible ones cut when the line is too narrow."""

from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from scriptdispatch.cli.screen import Cell, Column

GAP = 2
LEAST = 8  # below this a flexible column says nothing any more


def layout(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, own: Callable[[str], str]
) -> Iterator[Text]:
    texts = [[own(cell.text) for cell in row] for row in rows]
    widths = fit([_widest(column.title, [row[i] for row in texts]) for i, column in enumerate(columns)], columns, width)
    yield _line([(column.title, "bold") for column in columns], columns, widths, own)
    for row, shown in zip(rows, texts, strict=True):
        yield _line([(text, cell.style) for cell, text in zip(row, shown, strict=True)], columns, widths, own)


def fit(wanted: list[int], columns: Sequence[Column], width: int) -> list[int]:
    """The widths, with what is too much taken from the widest flexible column, again and again."""
    widths = list(wanted)
    too_much = sum(widths) + GAP * (len(widths) - 1) - width
    while too_much > 0:
        flexible = [i for i, column in enumerate(columns) if column.flexible and widths[i] > LEAST]
        if not flexible:
            break
        widest = max(flexible, key=lambda i: widths[i])
        widths[widest] -= 1
        too_much -= 1
    return widths


def cut(text: str, width: int, own: Callable[[str], str]) -> str:
    if cell_len(text) <= width:
        return text
    mark = own("…")
    return set_cell_size(text, max(0, width - len(mark))).rstrip() + mark


def _widest(title: str, texts: Sequence[str]) -> int:
    return max(len(title), *(cell_len(text) for text in texts))


def _line(cells: list[tuple[str, str]], columns: Sequence[Column], widths: list[int], own: Callable[[str], str]) -> Text:
    line = Text()
    for i, ((text, style), column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        shown = cut(text, width, own)
        space = " " * (width - cell_len(shown))
        last = i == len(columns) - 1
        line.append(space if column.right else "")
        line.append(shown, style=style or None)
        line.append("" if last else ("" if column.right else space) + " " * GAP)
    line.rstrip()
    return line
