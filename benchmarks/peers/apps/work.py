"""The work of one task as a user of a task queue writes it, once with blocking calls and once with asyncio.

dispatch: lock, read, insert the execution, pending → running, POST, running → send_success.
finish:   5 log lines, task → success, execution → success, unlock. It follows at once, in the same task: a real result
would come later and cost a second dispatch, so this favours the peers.
"""

import os
import time
import uuid
from functools import cache
from typing import Any

REDIS_URL, MONGO_URL, PUSH_URL = (os.environ[f"BENCH_{name}_URL"] for name in ("REDIS", "MONGO", "PUSH"))
DATABASE = os.environ["BENCH_DATABASE"]
LOG_LINES = 5
IN_FLIGHT = 64  # of an asyncio worker
SCRIPT = "echo hello from scriptdispatch; uname -a\n" * 25  # 1 KiB
UNLOCK = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0"
Document = dict[str, Any]


def task_document(number: int) -> Document:
    now = time.time()
    return {
        "_id": f"{os.getpid():08d}{number:016d}", "device": f"dev-{number}", "state": "pending", "version": 0, "attempt": 0,
        "script": f"#T={now:.6f};\n{SCRIPT}", "created_at": now, "updated_at": now,
    }  # fmt: skip


def compare_and_set(id: str, version: int, old: str, new: str, **more: Any) -> tuple[Document, Document]:
    where = {"_id": id, "state": old, "version": version}
    return where, {"$set": {"state": new, "updated_at": time.time(), **more}, "$inc": {"version": 1}}


def execution_document(task: Document, token: str) -> Document:
    return {
        "_id": uuid.uuid4().hex, "task_id": task["_id"], "device": task["device"], "state": "running", "version": 0,
        "token": token, "started_at": time.time(),
    }  # fmt: skip


def log_documents(task_id: str, execution_id: str) -> list[Document]:
    now, line = time.time(), "output line of the script on the device " * 2
    return [{"task_id": task_id, "execution_id": execution_id, "seq": n, "at": now, "line": line} for n in range(LOG_LINES)]


def body(task: Document, execution_id: str) -> Document:
    return {"device": task["device"], "task_id": task["_id"], "execution_id": execution_id, "script": task["script"]}


def won(result: Any) -> None:
    if result.modified_count != 1:
        raise RuntimeError("somebody else changed it")


# --- blocking


@cache
def parts(pid: int) -> tuple[Any, Any, Any, Any]:
    """Connections of this process: they do not survive a fork."""
    import httpx
    import pymongo
    import redis

    locks = redis.Redis.from_url(REDIS_URL)
    http = httpx.Client(limits=httpx.Limits(max_connections=256, max_keepalive_connections=256))
    return locks, pymongo.MongoClient(MONGO_URL, maxPoolSize=256)[DATABASE], http, locks.register_script(UNLOCK)


def carry_out(task_id: str, device: str) -> None:
    locks, db, http, unlock = parts(os.getpid())
    token = uuid.uuid4().hex
    if not locks.set(f"lock:{device}", token, nx=True, px=60_000):
        raise RuntimeError("the device is busy")
    task = db.tasks.find_one({"_id": task_id})
    execution = execution_document(task, token)
    db.executions.insert_one(execution)
    won(db.tasks.update_one(*compare_and_set(task_id, 0, "pending", "running", execution_id=execution["_id"])))
    http.post(PUSH_URL, json=body(task, execution["_id"])).raise_for_status()
    won(db.tasks.update_one(*compare_and_set(task_id, 1, "running", "send_success")))
    db.logs.insert_many(log_documents(task_id, execution["_id"]))
    won(db.tasks.update_one(*compare_and_set(task_id, 2, "send_success", "success")))
    won(db.executions.update_one(*compare_and_set(execution["_id"], 0, "running", "success")))
    if not unlock(keys=[f"lock:{device}"], args=[token]):
        raise RuntimeError("the lock is gone")


# --- asyncio


class Asynchronous:
    """One for each process, made inside its loop."""

    def __init__(self) -> None:
        import aiohttp
        import pymongo
        import redis.asyncio

        self._locks = redis.asyncio.Redis.from_url(REDIS_URL)
        self._db: Any = pymongo.AsyncMongoClient(MONGO_URL, maxPoolSize=IN_FLIGHT)[DATABASE]
        self._unlock = self._locks.register_script(UNLOCK)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT))

    async def carry_out(self, task_id: str, device: str) -> None:
        token, db = uuid.uuid4().hex, self._db
        if not await self._locks.set(f"lock:{device}", token, nx=True, px=60_000):
            raise RuntimeError("the device is busy")
        task = await db.tasks.find_one({"_id": task_id})
        execution = execution_document(task, token)
        id = execution["_id"]
        await db.executions.insert_one(execution)
        won(await db.tasks.update_one(*compare_and_set(task_id, 0, "pending", "running", execution_id=id)))
        async with self._http.post(PUSH_URL, json=body(task, id)) as response:
            response.raise_for_status()
            await response.read()
        won(await db.tasks.update_one(*compare_and_set(task_id, 1, "running", "send_success")))
        await db.logs.insert_many(log_documents(task_id, id))
        won(await db.tasks.update_one(*compare_and_set(task_id, 2, "send_success", "success")))
        won(await db.executions.update_one(*compare_and_set(id, 0, "running", "success")))
        if not await self._unlock(keys=[f"lock:{device}"], args=[token]):
            raise RuntimeError("the lock is gone")
