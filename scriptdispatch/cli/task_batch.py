"""`task batch`: many tasks from a file, one JSON body a line."""

import json
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import IO, Annotated, Any

import typer

from scriptdispatch.cli.session import Session, wrong
from scriptdispatch.cli.signs import clean

SHOWN = 5  # failures named in the summary line; --json has all


def batch(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="One task body (JSON) a line; - for stdin.")],
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same file again under it creates nothing twice.")
    ] = None,
) -> None:
    """Create many tasks, in requests of up to 1,000. Exit 1 if some were refused; the others are created."""
    from scriptdispatch.client import chunks

    key = idempotency_key or uuid.uuid4().hex
    whole: dict[str, Any] = {"items": [], "created": 0, "failed": 0}
    with _opened(file) as source, _Progress(session) as progress:
        reader = _Reader(source)
        for number, chunk in enumerate(chunks(reader.bodies())):
            lines = reader.take(len(chunk))
            part = session.client.create_batch(list(chunk), idempotency_key=f"{key}-{number}")
            whole["items"] += [{**item, "index": lines[item["index"]] - 1} for item in part["items"]]
            whole["created"] += part["created"]
            whole["failed"] += part["failed"]
            progress.show(whole["created"], whole["failed"])
        whole["items"] = sorted([*whole["items"], *reader.bad], key=lambda item: item["index"])
        whole["failed"] += len(reader.bad)
    if session.screen.json:
        session.screen.document(whole)
    else:
        _summary(session, whole)
    if whole["failed"]:
        raise typer.Exit(1)


class _Reader:
    """The bodies of a file, and on which line each was. A line that is no JSON object is a failure of its own."""

    def __init__(self, source: IO[str]) -> None:
        self._source = source
        self._lines: list[int] = []
        self.bad: list[dict[str, Any]] = []

    def bodies(self) -> Iterator[Mapping[str, Any]]:
        for number, text in enumerate(self._source, start=1):
            if not text.strip():
                continue
            try:
                body = json.loads(text)
            except ValueError as error:
                self._refuse(number, f"not JSON: {error}")
                continue
            if not isinstance(body, dict):
                self._refuse(number, "not a JSON object")
                continue
            self._lines.append(number)
            yield body

    def take(self, count: int) -> list[int]:
        """The line numbers of the next `count` bodies handed out."""
        taken, self._lines = self._lines[:count], self._lines[count:]
        return taken

    def _refuse(self, number: int, detail: str) -> None:
        problem = {"status": 422, "code": "validation_error", "detail": detail}
        self.bad.append({"index": number - 1, "status": 422, "error": problem})


class _Progress:
    """One live line on a terminal; nothing elsewhere."""

    def __init__(self, session: Session) -> None:
        self._status: Any = None
        if session.screen.live:
            self._status = session.screen.console().status(session.screen.own("sending…"))

    def __enter__(self) -> "_Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, created: int, failed: int) -> None:
        if self._status is not None:
            self._status.update(f"{created:,} created" + (f", {failed:,} failed" if failed else ""))


def _summary(session: Session, whole: dict[str, Any]) -> None:
    if not whole["failed"]:
        session.screen.done(f"{whole['created']:,} created")
        return
    bad = [item for item in whole["items"] if "error" in item]
    named = "; ".join(f"line {item['index'] + 1} {_cause(item['error'])}" for item in bad[:SHOWN])
    more = f"; and {len(bad) - SHOWN:,} more (--json lists all)" if len(bad) > SHOWN else ""
    session.screen.parts(
        ("✓", "green"),
        (f" {whole['created']:,} created · ", ""),
        ("✕", "red"),
        (f" {whole['failed']:,} failed: {named}{more}", ""),
    )


def _cause(problem: dict[str, Any]) -> str:
    fields = problem.get("errors") or []
    detail = f"{fields[0].get('field')}: {fields[0].get('message')}" if fields else str(problem.get("detail") or "")
    return clean(f"{problem.get('code')} {detail}".strip())


def _opened(file: str) -> Any:
    if file == "-":
        return nullcontext(sys.stdin)
    try:
        return open(file, encoding="utf-8")
    except OSError as error:
        raise wrong("FILE", f"cannot read {file}: {error.strerror}") from None
