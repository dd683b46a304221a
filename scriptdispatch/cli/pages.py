"""Lists that come page by page: their options, reading on, and how they end."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from scriptdispatch.cli.screen import Screen

LARGEST = 500
Limit = Annotated[int, typer.Option("--limit", min=1, max=LARGEST, help="How many at most.")]
Cursor = Annotated[str | None, typer.Option("--cursor", help="Go on where the last page ended.")]
Every = Annotated[bool, typer.Option("--all", help="All pages.")]


def read(fetch: Callable[[str | None], dict[str, Any]], cursor: str | None, every: bool) -> dict[str, Any]:
    """One page from the cursor on, or with `every` all that are left as one."""
    page = fetch(cursor)
    items, following = list(page["items"]), page.get("next_cursor")
    while every and following:
        more = fetch(following)
        items += more["items"]
        following = more.get("next_cursor")
    return {**page, "items": items, "next_cursor": following}


def note(screen: Screen, page: dict[str, Any]) -> None:
    """That there is more, and how to see it. The API counts no total: that would cost a walk over all."""
    if page.get("next_cursor"):
        screen.note(f"{len(page['items']):,} shown; --all or --cursor {page['next_cursor']} for more")
