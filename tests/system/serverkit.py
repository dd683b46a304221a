"""For tests on real servers: several nodes of one installation, and what nodes, locks and stores say about themselves."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from pymongo import MongoClient
from pymongo.database import Database

from tests.server_cache import Missing
from tests.server_process import Server
from tests.servers import absent, private
from tests.system.crashkit import accepted, every_child
from tests.system.faultkit import FAST
from tests.system.harness import Cluster, Process, on_servers

Document = dict[str, Any]


@contextmanager
def installed_on(folder: Path, mongo: str, redis: str, pulsar: str, **settings: Any) -> Iterator[Cluster]:
    """An installation on servers, under names of its own, with short intervals unless the settings say otherwise."""
    cluster = Cluster(folder, **{**on_servers(mongo, redis, pulsar), **FAST, **settings})
    try:
        yield cluster
    finally:
        stop(cluster)


@contextmanager
def own(name: str, **options: Any) -> Iterator[Server]:
    """A server that the tests of one file may break: like the fixture `start_server`, for longer than one test."""
    try:
        server = private(name, **options)
    except Missing as missing:
        absent(name, missing)
    with server:
        yield server


def stop(cluster: Cluster) -> None:
    """Also processes that a test has stopped by a signal, and their children: all at once, by pid."""
    children = [child for process in cluster.processes if process.alive() for child in every_child(process)]
    cluster.stop()
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None, url
    return port


# --- nodes


def start_nodes(cluster: Cluster, *names: str, crash: dict[str, str] | None = None, **settings: Any) -> list[Process]:
    """All at once; back when all of their workers are ready."""
    faults = crash or {}
    started = [cluster.start_node(crash=faults.get(n, ""), wait=False, node_name=n, **settings) for n in names]
    wait_workers(cluster, *started)
    return started


def wait_workers(cluster: Cluster, *nodes: Process) -> None:
    def ready() -> bool:
        rows = cluster.client.get("/workers").json()["items"]
        known = {row["pid"] for row in rows if row["status"] == "ready"}
        return all(len(known & {child.pid for child in node.children("worker")}) >= 2 for node in nodes)

    cluster.until(ready, 40, "the workers of every node to be ready")


def nodes(cluster: Cluster) -> dict[str, Document]:
    """The rows of `GET /nodes`, newest of each name."""
    answer = cluster.client.get("/nodes")
    assert answer.status_code == 200, answer.text
    return {row["name"]: row for row in reversed(answer.json()["items"])}


def leader(cluster: Cluster) -> tuple[str, int] | None:
    """Who leads, in which term; never two of them."""
    leading = [row for row in nodes(cluster).values() if row["leader"]]
    assert len(leading) <= 1, leading
    return (leading[0]["name"], leading[0]["term"]) if leading else None


def wait_leader(cluster: Cluster, timeout: float = 30, *, other_than: str = "") -> tuple[str, int]:
    def found() -> tuple[str, int] | None:
        who = leader(cluster)
        return who if who is not None and who[0] != other_than else None

    who: tuple[str, int] = cluster.until(found, timeout, f"a leader other than {other_than or 'nobody'}")
    return who


def said(process: Process, words: str) -> list[Document]:
    """Lines of the process's log whose message begins with these words."""
    found = []
    for line in process.log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):
            row = json.loads(line)
            if str(row.get("event", "")).startswith(words):
                found.append(row)
    return found


# --- behind the product's back


@contextmanager
def database(cluster: Cluster) -> Iterator[Database[Document]]:
    client: MongoClient[Document]
    with MongoClient(str(cluster.settings["store_url"]), serverSelectionTimeoutMS=5000) as client:
        yield client.get_default_database()


def stored(cluster: Cluster, device: str) -> list[str]:
    """Ids of the device's tasks in the store."""
    with database(cluster) as store:
        return sorted(str(row["_id"]) for row in store["script_task"].find({"device_id": device}, {"_id": 1}))


def open_rows(cluster: Cluster) -> int:
    with database(cluster) as store:
        return store["task_execution"].count_documents({"active": True})


# --- what people see


def into_the_topic(cluster: Cluster, *messages: Document) -> None:
    """As central control does: straight to the broker, durable when this returns. The API has no part in it."""
    import pulsar  # not there on every laptop: a test that comes here has asked for a broker

    client = pulsar.Client(str(cluster.settings["mq_url"]), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        producer = client.create_producer(str(cluster.settings["mq_topic"]))
        for each in messages:
            producer.send(json.dumps(each).encode(), partition_key=str(each["device_id"]))
    finally:
        client.close()


def lock_of(cluster: Cluster, device: str) -> str | None:
    """The execution (or stranger) that holds the device."""
    answer = cluster.client.get(f"/devices/{device}")
    assert answer.status_code == 200, answer.text
    lock = answer.json()["lock"]
    return lock and str(lock["holder"])


def load(cluster: Cluster, count: int, devices: int, first: int = 1, **body: Any) -> list[str]:
    """Some tasks on each device."""
    return cluster.create_many([cluster.body(f"dev-{first + i % devices:03d}", **body) for i in range(count)])


def under_way(cluster: Cluster, ids: list[str], pushed: int) -> None:
    """Some are pushed, and some are not: in the middle of the load."""
    cluster.until(lambda: sum(accepted(cluster, ids).values()) >= pushed, 40, f"{pushed} pushes", every=0.02)
    assert sum(accepted(cluster, ids).values()) < len(ids), "the load was over before the fault"


def all_succeeded(cluster: Cluster, ids: list[str], timeout: float, *, retries: int | None = 0) -> None:
    """Every one of them, each by one successful run on its device. `retries` None: some may have cost one."""
    cluster.wait_all(ids, timeout=timeout)
    tasks = [cluster.task(task_id) for task_id in ids]
    assert {task["status"] for task in tasks} == {"success"}
    if retries is not None:
        assert {task["retry_count"] for task in tasks} == {retries}
        assert set(accepted(cluster, ids).values()) == {1}
    good = [entry["task_id"] for entry in cluster.ledger() if entry["event"] == "result" and entry.get("type") == "SUCCESS"]
    assert sorted(task_id for task_id in good if task_id in set(ids)) == sorted(ids)
