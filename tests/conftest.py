"""For all tests: what runs beside what, how long hypothesis looks, and a closing list of what a missing server skipped."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.servers import (  # noqa: F401  (pytest finds fixtures and hooks here)
    NO_SERVER,
    mongo_url,
    pulsar_url,
    pytest_configure,
    pytest_unconfigure,
    redis_url,
    start_server,
)

SYSTEM = Path(__file__).parent / "system"

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _own_log_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command run inside a test sets up logging for its process: that ends with the test, in loggers already made too."""
    configure, before = structlog.configure, structlog.get_config()
    monkeypatch.setattr(structlog, "configure", lambda **chosen: configure(**{**chosen, "cache_logger_on_first_use": False}))
    yield
    configure(**before)
    structlog.contextvars.clear_contextvars()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """System tests of one file share processes and time limits: they stay on one xdist worker, in their order."""
    for item in items:
        if item.path.is_relative_to(SYSTEM):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            item.add_marker(pytest.mark.system)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`-ra` shows every skip; this says which of them a server would have run."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    missing = {reason.removeprefix(NO_SERVER): n for reason, n in reasons.items() if reason.startswith(NO_SERVER)}
    if missing:
        terminalreporter.section("skipped because a server is missing")
        for reason, n in sorted(missing.items()):
            terminalreporter.line(f"{n} test{'s' if n > 1 else ''}  {reason}")
