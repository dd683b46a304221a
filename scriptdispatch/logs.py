"""Log lines to stderr: readable on a terminal, JSON elsewhere, with an `event` field for programs either way."""

import logging
import sys
from typing import Any, TextIO, cast

import structlog

# Without the values of variables: they may hold secret params.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
Logger = structlog.stdlib.BoundLogger


class _Stderr:
    """Whatever `sys.stderr` is at the time of the line: one that stood in its place may be closed by now."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure(level: str, form: str, **bound: Any) -> None:
    """Once per process. `bound` is added to every line (role, node, worker)."""
    readable = form == "console" or (form == "auto" and sys.stderr.isatty())
    last: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if readable
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if readable else [_TRACEBACKS]),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # A line and its end in one write: the processes of a node share the file, also where Python does not buffer.
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)


def get(room: str) -> Any:
    return structlog.get_logger(room=room)
