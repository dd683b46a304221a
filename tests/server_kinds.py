"""How redis-server, mongod and a Pulsar broker are started for tests, and when each counts as ready."""

import http.client
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.server_cache import Missing, find_mongod, find_pulsar, find_redis
from tests.server_process import Kind

LOOPBACK = "127.0.0.1"
REPLICA_SET = "rs0"
ALREADY_INITIALIZED = 23  # a code of mongod

if TYPE_CHECKING:
    from pymongo import MongoClient


@dataclass(frozen=True)
class Redis:
    """Forgets everything when it dies, unless `durable` (append-only file, flushed at every write)."""

    binary: Path
    durable: bool = False
    options: tuple[str, ...] = ()  # more of redis-server's, such as ("--maxmemory-policy", "allkeys-lru")
    name: str = "redis"
    ports: int = 1
    patience_s: float = 20

    def command(self, data: Path, ports: tuple[int, ...]) -> list[str]:
        keep = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        where = ["--bind", LOOPBACK, "--port", str(ports[0]), "--dir", str(data)]
        return [str(self.binary), *where, "--save", "", *keep, *self.options]

    def environment(self, data: Path) -> Mapping[str, str]:
        return {}

    def ready(self, ports: tuple[int, ...]) -> bool:
        with socket.create_connection((LOOPBACK, ports[0]), timeout=1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith(b"+PONG")  # or -LOADING

    def url(self, ports: tuple[int, ...]) -> str:
        return f"redis://{LOOPBACK}:{ports[0]}/0"


@dataclass(frozen=True)
class Mongo:
    """A replica set of one, journaled: majority writes, transactions and step-downs as in production."""

    binary: Path
    options: tuple[str, ...] = ()
    name: str = "mongo"
    ports: int = 1
    patience_s: float = 60

    def command(self, data: Path, ports: tuple[int, ...]) -> list[str]:
        where = ["--bind_ip", LOOPBACK, "--port", str(ports[0]), "--dbpath", str(data), "--nounixsocket"]
        small = [
            "--wiredTigerCacheSizeGB",
            "0.5",
            "--oplogSize",
            "256",
            "--setParameter",
            "diagnosticDataCollectionEnabled=false",
        ]
        return [str(self.binary), *where, "--replSet", REPLICA_SET, *small, *self.options]

    def environment(self, data: Path) -> Mapping[str, str]:
        return {}

    def ready(self, ports: tuple[int, ...]) -> bool:
        """Makes the replica set when there is none yet; ready when it has its primary."""
        from pymongo import MongoClient
        from pymongo.errors import ConnectionFailure

        address = f"mongodb://{LOOPBACK}:{ports[0]}/?directConnection=true"
        client: MongoClient[dict[str, Any]]
        with MongoClient(address, serverSelectionTimeoutMS=2000, socketTimeoutMS=10_000) as client:
            try:
                return _has_primary(client, f"{LOOPBACK}:{ports[0]}")
            except ConnectionFailure:
                return False

    def url(self, ports: tuple[int, ...]) -> str:
        return f"mongodb://{LOOPBACK}:{ports[0]}/?replicaSet={REPLICA_SET}"


class MongoAlone(Mongo):
    """Not in a replica set: no oplog, no majority; what it has is on one disk."""

    def command(self, data: Path, ports: tuple[int, ...]) -> list[str]:
        command = super().command(data, ports)
        at = command.index("--replSet")
        return command[:at] + command[at + 2 :]

    def ready(self, ports: tuple[int, ...]) -> bool:
        from pymongo import MongoClient

        client: MongoClient[dict[str, Any]]
        with MongoClient(self.url(ports), serverSelectionTimeoutMS=2000) as client:
            return bool(client.admin.command("hello").get("isWritablePrimary"))

    def url(self, ports: tuple[int, ...]) -> str:
        return f"mongodb://{LOOPBACK}:{ports[0]}/?directConnection=true"


def _has_primary(client: "MongoClient[dict[str, Any]]", host: str) -> bool:
    from pymongo.errors import OperationFailure

    hello = client.admin.command("hello")
    if hello.get("isreplicaset"):  # meant to be one, and has no configuration, or has not read it yet
        try:
            client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": [{"_id": 0, "host": host}]})
        except OperationFailure as failure:
            if failure.code != ALREADY_INITIALIZED:
                raise
        hello = client.admin.command("hello")
    return bool(hello.get("isWritablePrimary"))


@dataclass(frozen=True)
class Pulsar:
    """A standalone broker with its bookie: 7 s to start, 400 MB of memory. Ports: broker, web (admin API), bookie."""

    home: Path
    settings: tuple[tuple[str, str], ...] = ()  # more of standalone.conf's
    name: str = "pulsar"
    ports: int = 3
    patience_s: float = 110

    def command(self, data: Path, ports: tuple[int, ...]) -> list[str]:
        (data / "standalone.conf").write_text(self._configuration(ports))
        folders = ["--metadata-dir", str(data / "metadata"), "--bookkeeper-dir", str(data / "bookies")]
        flags = ["-nfw", "-nss", "-a", LOOPBACK, "--bookkeeper-port", str(ports[2])]
        return [str(self.home / "bin" / "pulsar"), "standalone", *flags, *folders]

    def environment(self, data: Path) -> Mapping[str, str]:
        return {
            "PULSAR_STANDALONE_CONF": str(data / "standalone.conf"),
            "PULSAR_LOG_DIR": str(data / "logs"),
            "PULSAR_GC": "-XX:+UseSerialGC",
            "PULSAR_GC_LOG": " ",
            "PULSAR_EXTRA_OPTS": "-XX:TieredStopAtLevel=1",  # half the CPU at start: 6 s instead of 12
            "PULSAR_MEM": "-Xms256m -Xmx512m -XX:MaxDirectMemorySize=512m",
        }

    def ready(self, ports: tuple[int, ...]) -> bool:
        """Healthy is not enough: the namespace that topics live in is made a moment later."""
        healthy = _get(ports[1], "/admin/v2/brokers/health") == b"ok"
        return healthy and b"public/default" in _get(ports[1], "/admin/v2/namespaces/public")

    def url(self, ports: tuple[int, ...]) -> str:
        return f"pulsar://{LOOPBACK}:{ports[0]}"

    def _configuration(self, ports: tuple[int, ...]) -> str:
        """The distribution's own, with ours in place of the lines of the same name."""
        ours = {
            "brokerServicePort": str(ports[0]),
            "webServicePort": str(ports[1]),
            "bindAddress": LOOPBACK,
            "advertisedAddress": LOOPBACK,
            "listeningInterface": "lo0" if sys.platform == "darwin" else "lo",  # the bookie's: it takes no address
            "allowEphemeralPorts": "true",  # else the bookie does not take the port that it is given
            "journalSyncData": "false",
            "webSocketServiceEnabled": "false",
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.98",
            # There is one bookie: a broker that shuns it for half an hour after a rough start can store nothing.
            "bookkeeperClientHealthCheckEnabled": "false",
            **dict(self.settings),
        }
        lines = (self.home / "conf" / "standalone.conf").read_text().splitlines()
        theirs = [line for line in lines if line.partition("=")[0].strip() not in ours]
        return "\n".join([*theirs, *(f"{name}={value}" for name, value in ours.items()), ""])


def _get(port: int, path: str) -> bytes:
    """The body of a good answer, else nothing."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else b""
    except http.client.HTTPException:
        return b""
    finally:
        connection.close()


def redis(*, durable: bool = False, options: tuple[str, ...] = ()) -> Kind:
    """Like the next two: raises `Missing` when the program is not on this machine."""
    return Redis(find_redis(), durable, options)


def mongo(*, options: tuple[str, ...] = (), alone: bool = False) -> Kind:
    try:
        import pymongo  # noqa: F401
    except ImportError:
        raise Missing("setting up mongod needs pymongo: install the extra `mongo`") from None
    return (MongoAlone if alone else Mongo)(find_mongod(), options)


def pulsar(*, settings: tuple[tuple[str, str], ...] = ()) -> Kind:
    return Pulsar(find_pulsar(), settings)


KINDS: dict[str, Callable[..., Kind]] = {"redis": redis, "mongo": mongo, "pulsar": pulsar}
