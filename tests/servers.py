"""Real servers for tests: redis-server, mongod and a Pulsar broker, without Docker.

Shared ones are the session fixtures `redis_url`, `mongo_url` and `pulsar_url`: started when a test first asks, once for all
workers of pytest-xdist, ended with the run. Tests keep to names of their own (a prefix, a database, a topic). Tests that
break a server take one for themselves: the fixture `start_server`, or `private`.

SCRIPTDISPATCH_TEST_<NAME>_URL     an address that is used as it is; nothing is started
SCRIPTDISPATCH_TEST_REQUIRE       redis,mongo,pulsar or all: these fail where they would be skipped

    python -m tests.servers           starts all three, prints the settings to use with `serve`, until Ctrl-C
    python -m tests.servers fetch     downloads what is missing; a test run never does
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]
import pytest

from tests.server_cache import Missing, fetch_mongod, fetch_pulsar, fetch_redis, locked
from tests.server_kinds import KINDS
from tests.server_process import Server

NO_SERVER = "no server: "  # the beginning of a skip for want of a server: they are listed at the end of the run
PREFIX = "SCRIPTDISPATCH_TEST_"
RUN = PREFIX + "RUN"  # <pid of the run's first process>:<folder that its workers share>
SETTINGS = {"mongo": "STORE_URL", "redis": "QUEUE_URL", "pulsar": "MQ_URL"}
_started: list[Server] = []  # by this process for its whole run; kept, for a child must not be forgotten while it runs
FETCHERS = {"redis": fetch_redis, "mongo": fetch_mongod, "pulsar": fetch_pulsar}


# --- for one test alone


def private(name: str, folder: Path | None = None, **options: Any) -> Server:
    """A started server of the caller's own, to kill, pause and restart; `with`, or `close()`, ends it. Raises `Missing`.

    `options` are those of the kind (`tests.server_kinds`): `private("redis", durable=True)`.
    """
    server = Server(KINDS[name](**options), folder or Path(tempfile.mkdtemp(prefix=f"sd-{name}-")))
    try:
        return server.start()
    except BaseException:
        server.close()
        raise


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server("mongo")` is `private`, ended with the test; skips or fails like the shared ones."""
    with contextlib.ExitStack() as started:

        def start(name: str, **options: Any) -> Server:
            try:
                return started.enter_context(private(name, **options))
            except Missing as missing:
                absent(name, missing)

        yield start


# --- one for the whole run


@pytest.fixture(scope="session")
def redis_url() -> str:
    """An empty Redis at first; other tests use it too: take a prefix of your own, and never FLUSHALL."""
    return ask("redis")


@pytest.fixture(scope="session")
def mongo_url() -> str:
    """A replica set of one, with no database in the address: see `with_database`."""
    return ask("mongo")


@pytest.fixture(scope="session")
def pulsar_url() -> str:
    """A broker; take a topic of your own."""
    return ask("pulsar")


def ask(name: str) -> str:
    """The address of the run's server; skips the test that asks, or fails it, when there can't be one."""
    if given := os.environ.get(f"{PREFIX}{name.upper()}_URL"):
        return given
    try:
        return _shared(name)
    except Missing as missing:
        absent(name, missing)


def absent(name: str, missing: Missing) -> NoReturn:
    """What a missing server means for the test that asked: skipped on a laptop, failed where it is required."""
    required = os.environ.get(PREFIX + "REQUIRE", "").replace(" ", "").split(",")
    if name in required or "all" in required:
        pytest.fail(f"{name} is required here, but: {missing}", pytrace=False)
    pytest.skip(f"{NO_SERVER}{name}: {missing}")


def with_database(url: str, database: str) -> str:
    """A MongoDB address that names a database: mongodb://host:1/?x=y → mongodb://host:1/database?x=y."""
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    host = address.partition("/")[0]
    return f"{scheme}://{host}/{database}" + (f"?{query}" if query else "")


def pytest_configure(config: pytest.Config) -> None:
    """The first process of a run owns its servers; the workers of xdist start later and inherit the name of its folder."""
    if RUN not in os.environ:
        os.environ[RUN] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='sd-servers-')}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends what the run started, in whichever worker: they are gone by now. If we never get here, the keeper does it."""
    owner, _, folder = os.environ.get(RUN, "").partition(":")
    if owner != str(os.getpid()):
        return
    del os.environ[RUN]
    for record in Path(folder).glob("*.json"):
        _end(json.loads(record.read_text()))
    shutil.rmtree(folder, ignore_errors=True)


def _shared(name: str) -> str:
    owner, _, folder = os.environ[RUN].partition(":")
    record = Path(folder) / f"{name}.json"
    with locked(Path(folder) / f"{name}.lock"):
        if not record.exists():
            server = Server(KINDS[name](), Path(folder) / name, owner=int(owner)).start()
            facts = {"url": server.url, "pid": server.pid, "started": psutil.Process(server.pid).create_time()}
            # Killed before this line, the server has no record; its keeper still ends it with the run.
            record.write_text(json.dumps(facts))
            _started.append(server)
        url: str = json.loads(record.read_text())["url"]
        return url


def _end(facts: dict[str, Any]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(facts["pid"])
        if process.create_time() == facts["started"]:  # else the pid belongs to somebody else by now
            process.kill()
            process.wait(20)


# --- for a person


def fetch() -> int:
    """Downloads what is missing, and says what could not be had."""
    failed = 0
    for name, get in FETCHERS.items():
        try:
            print(f"{name}: {get()}", flush=True)
        except Missing as missing:
            failed += 1
            print(f"{name}: {missing}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def stay() -> int:
    """All three on free ports in a temporary folder, until Ctrl-C or SIGTERM; their data goes with them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as started:
        try:
            print("starting redis, mongod and Pulsar; the first time takes a little longer", file=sys.stderr, flush=True)
            urls = {name: started.enter_context(private(name)).url for name in KINDS}
            _tell(urls)
            signal.pause()
        except Missing as missing:
            print(missing, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("ending them", file=sys.stderr)
    return 0


def _tell(urls: dict[str, str]) -> None:
    urls["mongo"] = with_database(urls["mongo"], "scriptdispatch")
    for name, setting in SETTINGS.items():
        print(f"export SCRIPTDISPATCH_{setting}='{urls[name]}'")
    print(
        "# for the shells of `scriptdispatch serve` and `scriptdispatch web`; Ctrl-C here ends the servers and their data",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["fetch"]):
        sys.exit("usage: python -m tests.servers [fetch]")
    sys.exit(fetch() if sys.argv[1:] else stay())
