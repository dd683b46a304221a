"""The proxy that fault tests lean on: each fault does what it says, and is counted when it does."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server_process import Server
from tests.system.proxy import Proxy


class Echo:
    """A server that answers each line with the line, and remembers what it got."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lines: list[bytes] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed by the test
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    self.lines.append(line)
                    connection.sendall(line)
        except OSError:
            return  # the fault under test

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


class Caller:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=5)

    def say(self, line: bytes) -> None:
        self._sock.sendall(line)

    def hear(self, size: int, timeout: float = 5) -> bytes:
        """So many bytes, or what came before the end."""
        self._sock.settimeout(timeout)
        heard = b""
        while len(heard) < size and (data := self._sock.recv(size - len(heard))):
            heard += data
        return heard

    def ask(self, line: bytes) -> bytes:
        self.say(line)
        return self.hear(len(line))

    def end(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as made:
        yield made


@pytest.fixture
def call(proxy: Proxy) -> Iterator[Callable[[], Caller]]:
    made: list[Caller] = []

    def connect() -> Caller:
        made.append(Caller(proxy.port))
        return made[-1]

    yield connect
    for caller in made:
        caller.close()


def until(condition: Callable[[], Any], timeout: float = 5) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def test_without_a_fault_everything_arrives_in_both_directions(proxy: Proxy, call: Callable[[], Caller]) -> None:
    caller, long = call(), b"x" * 1_000_000 + b"\n"
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(caller.hear(len(long), 20)))
    reader.start()
    caller.say(long)
    reader.join(20)
    assert got == [long]
    assert not proxy.fired


def test_the_end_of_the_client_comes_after_its_last_line_and_the_answer_still_arrives(
    echo: Echo, proxy: Proxy, call: Callable[[], Caller]
) -> None:
    caller = call()
    caller.say(b"last words\n")
    caller.end()
    assert caller.hear(1000) == b"last words\n"
    until(lambda: proxy.connections == 0)


@pytest.mark.parametrize("reset", [False, True])
def test_a_dropped_reply_belongs_to_a_request_that_the_server_executed(
    echo: Echo, proxy: Proxy, call: Callable[[], Caller], reset: bool
) -> None:
    proxy.drop_reply(match=b"SET b", reset=reset)
    caller = call()
    assert caller.ask(b"SET a\n") == b"SET a\n"
    caller.say(b"SET b\n")
    if reset:
        with pytest.raises(ConnectionResetError):
            caller.hear(6)
    else:
        assert caller.hear(6) == b""
    assert echo.lines == [b"SET a\n", b"SET b\n"]
    assert proxy.fired == {"drop_reply": 1}
    assert call().ask(b"SET b\n") == b"SET b\n", "once means once"


def test_a_reply_is_dropped_as_often_as_was_asked_for(proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.drop_reply(times=3)
    for _ in range(3):
        caller = call()
        caller.say(b"hello\n")
        assert caller.hear(1) == b""
    assert call().ask(b"hello\n") == b"hello\n"
    proxy.wait_fired("drop_reply", 3)


def test_a_request_that_comes_in_two_pieces_is_matched(echo: Echo, proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.drop_reply(match=b"EVALSHA")
    caller = call()
    assert caller.ask(b"warm\n") == b"warm\n"
    caller.say(b"first\nEVA")
    assert caller.hear(6) == b"first\n", "the first piece has passed the proxy"
    caller.say(b"LSHA\n")
    assert caller.hear(1) == b""
    assert echo.lines[-1] == b"EVALSHA\n"
    assert proxy.fired["drop_reply"] == 1


def test_requests_sent_ahead_are_all_executed_though_the_client_is_cut_at_the_first_reply(
    echo: Echo, proxy: Proxy, call: Callable[[], Caller]
) -> None:
    proxy.drop_reply()
    caller, lines = call(), [b"line %d\n" % i for i in range(2000)]
    caller.say(b"".join(lines))
    assert caller.hear(1) == b""
    until(lambda: len(echo.lines) == 2000)
    assert echo.lines == lines


def test_cut_ends_open_connections_and_new_ones_until_healed(proxy: Proxy, call: Callable[[], Caller]) -> None:
    caller = call()
    assert caller.ask(b"hello\n") == b"hello\n"
    proxy.cut()
    assert caller.hear(1) == b""
    assert call().hear(1) == b""
    assert proxy.fired["cut"] == 2
    proxy.heal()
    assert call().ask(b"hello\n") == b"hello\n"


def test_cut_once_serves_new_connections_at_once(proxy: Proxy, call: Callable[[], Caller]) -> None:
    caller = call()
    assert caller.ask(b"hello\n") == b"hello\n"
    proxy.cut_once(reset=True)
    with pytest.raises(ConnectionResetError):
        caller.hear(1)
    assert call().ask(b"hello\n") == b"hello\n"
    assert proxy.fired == {"cut": 1}


def test_a_black_hole_keeps_what_was_sent_until_it_is_healed(echo: Echo, proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.black_hole()
    caller = call()
    caller.say(b"hello\n")
    proxy.wait_fired("black_hole")
    with pytest.raises(TimeoutError):
        caller.hear(1, timeout=0.1)
    assert echo.lines == []
    proxy.heal()
    assert caller.hear(6) == b"hello\n"


def test_a_black_hole_for_replies_lets_the_server_execute(echo: Echo, proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.black_hole("to_client")
    caller = call()
    caller.say(b"hello\n")
    proxy.wait_fired("black_hole")
    assert echo.lines == [b"hello\n"]
    with pytest.raises(TimeoutError):
        caller.hear(1, timeout=0.1)


def test_delay_makes_an_answer_later_by_what_was_asked(proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    assert call().ask(b"hello\n") == b"hello\n"
    assert time.monotonic() - began >= 0.2
    assert proxy.fired["delay"] == 2


def test_slow_lets_data_trickle_and_healing_lets_the_rest_go(proxy: Proxy, call: Callable[[], Caller]) -> None:
    proxy.slow(10_000, "to_client")
    caller, began = call(), time.monotonic()
    assert caller.ask(b"x" * 1999 + b"\n") == b"x" * 1999 + b"\n"
    assert time.monotonic() - began > 0.15
    proxy.slow(1, "to_client")
    caller.say(b"y" * 1999 + b"\n")
    proxy.wait_fired("slow", 2)
    proxy.heal()
    assert caller.hear(2000) == b"y" * 1999 + b"\n"


def test_a_fault_that_did_not_fire_fails_the_test_that_waits_for_it(proxy: Proxy) -> None:
    proxy.drop_reply()
    with pytest.raises(AssertionError, match="drop_reply fired 0 times"):
        proxy.wait_fired("drop_reply", timeout=0.05)


def test_a_dead_server_looks_dead_through_the_proxy(echo: Echo, proxy: Proxy, call: Callable[[], Caller]) -> None:
    echo.close()
    until(lambda: _refused(echo.port))
    with pytest.raises(ConnectionResetError):
        call().hear(1)


def test_stopping_the_proxy_ends_its_connections_and_its_thread(echo: Echo) -> None:
    before = threading.active_count()
    proxy = Proxy(echo.port).start()
    caller = Caller(proxy.port)
    assert caller.ask(b"hello\n") == b"hello\n"
    proxy.black_hole()
    proxy.stop()
    proxy.stop()
    assert caller.hear(1) == b""
    caller.close()
    until(lambda: threading.active_count() <= before)


def test_an_address_is_rewritten_to_go_through_the_proxy(proxy: Proxy) -> None:
    here, direct = f"127.0.0.1:{proxy.port}", "directConnection=true"
    assert proxy.through("redis://:secret@127.0.0.1:1/0") == f"redis://:secret@{here}/0"
    assert proxy.through("mongodb://127.0.0.1:1/?replicaSet=rs0") == f"mongodb://{here}/?{direct}"
    assert proxy.through("mongodb://127.0.0.1:1/db?replicaSet=rs0&w=1") == f"mongodb://{here}/db?w=1&{direct}"
    assert proxy.through("http://127.0.0.1:1/path?q=1") == f"http://{here}/path?q=1"


def test_redis_executed_a_command_whose_reply_was_lost(start_server: Callable[..., Server]) -> None:
    redis = pytest.importorskip("redis")
    server = start_server("redis")
    with Proxy(server.port) as proxy:
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        client = redis.Redis.from_url(proxy.through(server.url), retry=retry)
        assert client.incr("a") == 1
        proxy.drop_reply(match=b"INCR")
        with pytest.raises(redis.exceptions.ConnectionError):
            client.incr("a")
        assert int(client.get("a")) == 2
        assert proxy.fired["drop_reply"] == 1
        client.close()


def test_mongod_executed_an_insert_whose_reply_was_lost(start_server: Callable[..., Server]) -> None:
    pymongo = pytest.importorskip("pymongo")
    server = start_server("mongo")
    with Proxy(server.port) as proxy:
        client = pymongo.MongoClient(proxy.through(server.url), retryWrites=False, serverSelectionTimeoutMS=5000)
        table = client["proxied"]["row"]
        table.insert_one({"_id": 1})
        proxy.drop_reply(match=b"insert\x00")
        with pytest.raises(pymongo.errors.AutoReconnect):
            table.insert_one({"_id": 2})
        assert [row["_id"] for row in table.find().sort("_id")] == [1, 2]
        assert proxy.fired["drop_reply"] == 1
        client.close()


def _refused(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0
