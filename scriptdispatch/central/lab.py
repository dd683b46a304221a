"""`scriptdispatch lab`: a central control system of our own for one machine (SPEC 5).

It really runs the scripts it takes, or with `simulate` only pretends; it publishes what happens as execution logs through
the API or a Pulsar broker, keeps a ledger for checkers, and misbehaves on demand (`PUT /faults`). A process of its own.
"""

import asyncio
import hashlib
import random
import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from msgspec import Struct

from scriptdispatch import logs
from scriptdispatch.central.client import PushRequest
from scriptdispatch.central.lab_faults import Faults, misbehaving
from scriptdispatch.central.lab_ledger import Ledger
from scriptdispatch.central.lab_outbox import Carrier, HttpCarrier, Outbox
from scriptdispatch.central.lab_runner import SUFFIX, Runner
from scriptdispatch.central.lab_server import Reply, Request, Session, json_reply
from scriptdispatch.central.lab_simulator import Simulator
from scriptdispatch.central.lab_voice import Studio
from scriptdispatch.errors import SettingsError

REMEMBERED: Final = 1_000_000  # execution ids kept to recognise a push that comes again
WITHOUT_DEVICE: Final = 64  # scripts without a device that really run at once
SEQ_AFTER_RESTART: Final = 1_000_000  # higher than any number that the lost run can have used
FLUSH_S: Final = 3.0
_EXECUTION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
log = logs.get("lab")


class LabConfig(Struct, frozen=True, kw_only=True):
    """The switches of `scriptdispatch lab`. Probabilities are 0 to 1; `duration` is seconds, or a range as "0.2-1.5"."""

    host: str = "127.0.0.1"
    port: int = 8090
    devices: int = 10
    simulate: bool = False
    duration: float | str = 0.5
    fail: float = 0.0
    refuse: float = 0.0
    silent: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    seed: int | None = None
    log_lines: int = 5
    busy_check: bool | None = None  # refuse a second script on a busy device; None: unless simulating
    deliver_url: str | None = "http://127.0.0.1:8080"
    deliver_token: str | None = None
    mq_url: str | None = None  # pulsar://…: results go there instead of to `deliver_url`
    mq_topic: str = "persistent://public/default/script-execution-logs"
    mq_secret: str | None = None
    folder: Path = Path(".scriptdispatch/lab")

    def __post_init__(self) -> None:
        for name in ("fail", "refuse", "silent", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"--{name}: must be a probability between 0 and 1, not {getattr(self, name)}")
        if self.mq_url is not None and not self.mq_url.startswith(("pulsar://", "pulsar+ssl://")):
            raise SettingsError(f"--mq-url: must start with pulsar:// or pulsar+ssl://, not {self.mq_url!r}")
        if self.devices < 0 or self.log_lines < 0:
            raise SettingsError("--devices and --log-lines: must not be negative")
        self.seconds()

    def seconds(self) -> tuple[float, float]:
        """`duration` as its shortest and longest."""
        parts = [self.duration] if isinstance(self.duration, float | int) else self.duration.split("-")
        try:
            shortest, longest = float(parts[0]), float(parts[-1])
        except ValueError:
            shortest, longest = 0.0, -1.0
        if len(parts) > 2 or not 0 <= shortest <= longest < 1e6:
            raise SettingsError(f"--duration: must be seconds (0.5) or a range (0.2-1.5), not {self.duration!r}")
        return shortest, longest


def run_lab(config: LabConfig, *, ready: Callable[[str], None] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Blocks, on a loop of its own. `ready` is called with the address once it listens.
    Raises SettingsError if the port is taken."""
    uvloop.run(_serve(config, ready))


async def _serve(config: LabConfig, ready: Callable[[str], None] | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    lab = Lab(config)
    sessions: set[Session] = set()
    try:
        server = await loop.create_server(lambda: Session(lab.handle, sessions), config.host, config.port, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"the lab cannot listen on {config.host}:{config.port} ({error.strerror or error}): "
            "stop what is using the port, or choose another with --port"
        ) from error
    lab.start()
    port = server.sockets[0].getsockname()[1]
    if ready is not None:
        ready(f"http://{config.host}:{port}")
    await stop.wait()
    server.close()
    await lab.stop()
    for session in list(sessions):
        session.abort()


class Lab:
    """The devices, who is on them, and the rules by which a push is taken. No I/O but the ledger's."""

    def __init__(self, config: LabConfig) -> None:
        self._config = config
        chance = random.Random(config.seed)
        self._chance = chance
        self.ledger = Ledger(config.folder)
        self.faults = Faults()
        real = not config.simulate
        self.outbox = Outbox(_carrier(config), self._delivered if real else None)
        self._studio = Studio(
            self.outbox, self.ledger, config.mq_secret,
            chance=chance, duplicate=config.duplicate, reorder=config.reorder,
        )  # fmt: skip
        self._machine: Runner | Simulator = (
            Runner(config.folder.absolute(), self.outbox, self._ended)
            if real
            else Simulator(
                self.outbox, self._ended, chance=chance, duration=config.seconds(),
                fail=config.fail, silent=config.silent, log_lines=config.log_lines,
            )
        )  # fmt: skip
        self._busy_check = real if config.busy_check is None else config.busy_check
        self._devices = {f"dev-{n:03d}": n for n in range(1, config.devices + 1)}
        self._running: dict[str, PushRequest] = {}
        self._on_device: dict[str, str] = {}
        self._fences: dict[str, int] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._decoder = msgspec.json.Decoder(PushRequest)

    def start(self) -> None:
        self.outbox.start()
        self._remember()

    async def stop(self) -> None:
        """Scripts that run are ended without a word; the next start reports them. What is said already goes out."""
        await self._machine.stop()
        if not await self.outbox.flush(FLUSH_S):
            log.warning("lab.undelivered", messages=self.outbox.waiting)
        await self.outbox.stop()
        self.ledger.close()

    # ---------------------------------------------------------------------------------------------------------- requests

    def handle(self, request: Request) -> Reply:
        match request.method, request.segments:
            case "POST", ["scripts"]:
                return self._push(request)
            case "GET", ["devices", device_id]:
                return self._with_faults("devices", device_id, lambda: self._device(device_id))
            case "GET", ["devices"]:
                return json_reply(200, {"items": [self._shown(device_id) for device_id in self._devices]})
            case "POST", ["executions", execution_id, "cancel"]:
                return self._with_faults("cancel", None, lambda: self._cancel(execution_id))
            case "GET", ["ledger"]:
                return self._ledger(request)
            case "GET", ["healthz"]:
                return json_reply(200, self._health())
            case "POST", ["publish"]:
                return self._publish(request)
            case method, ["faults"]:
                return self._set_faults(method, request)
        return json_reply(404, {"error": "not_found", "message": f"no {request.method} {request.path} here"})

    def _with_faults(self, path: str, device_id: str | None, proper: Callable[[], Reply]) -> Reply:
        rule = self.faults.for_request(path, device_id)
        if rule is None:
            return proper()
        return misbehaving(rule, proper() if rule.executes else None)

    def _push(self, request: Request) -> Reply:
        try:
            push = self._decoder.decode(request.body)
        except msgspec.MsgspecError as error:
            return json_reply(422, {"error": "not_understood", "message": str(error)})
        return self._with_faults("scripts", push.device_id, lambda: self._judge(push))

    def _judge(self, push: PushRequest) -> Reply:
        """The rules, in the order in which they decide."""
        if push.execution_id in self._seen:
            self.ledger.write("duplicate", **_facts(push))
            return json_reply(409, {"error": "duplicate", "execution_id": push.execution_id})
        device_id = push.device_id
        if _EXECUTION_ID.fullmatch(push.execution_id) is None:  # it becomes the name of a folder
            return self._refuse(push, 422, "bad_execution_id")
        if device_id is not None and device_id not in self._devices:
            return self._refuse(push, 404, "unknown_device")
        if push.sha256 != hashlib.sha256((push.script or "").encode()).hexdigest():
            return self._refuse(push, 422, "hash_mismatch")
        if not self._config.simulate and push.language not in SUFFIX:
            return self._refuse(push, 422, "unknown_language")
        highest = self._fences.get(device_id, 0) if device_id is not None else 0
        if device_id is not None and push.fencing_token is not None and push.fencing_token <= highest:
            message = f"{device_id} has seen fencing token {highest}; {push.fencing_token} is of an older execution"
            return self._refuse(push, 412, "stale_fence", message=message)
        if self._busy_check and device_id is not None and (other := self._on_device.get(device_id)):
            return self._refuse(push, 409, "device_busy", execution_id=other)
        if self._config.refuse and self._chance.random() < self._config.refuse:
            return self._refuse(push, 422, "refused_by_chance")
        if device_id is None and not self._config.simulate and len(self._running) >= self._config.devices + WITHOUT_DEVICE:
            return self._refuse(push, 429, "too_many")
        return self._accept(push)

    def _accept(self, push: PushRequest) -> Reply:
        self.ledger.write("accepted", **_facts(push))
        self._note_seen(push.execution_id)
        self._running[push.execution_id] = push
        if push.device_id is not None:
            self._on_device[push.device_id] = push.execution_id
            if push.fencing_token is not None:
                self._fences[push.device_id] = push.fencing_token
        self._machine.start(push, self._studio.voice(push, self.faults.for_messages(push.device_id)))
        return Reply(202, b'{"status":"accepted"}')

    def _refuse(self, push: PushRequest, status: int, error: str, **rest: Any) -> Reply:
        self.ledger.write("refused", reason=error, status=status, **_facts(push))
        headers = [("Retry-After", "1")] if status == 429 else []
        return json_reply(status, {"error": error, **rest}, headers=headers)

    def _cancel(self, execution_id: str) -> Reply:
        known = execution_id in self._seen
        self.ledger.write("cancel", execution_id=execution_id, known=known)
        if not known:
            return json_reply(404, {"error": "unknown_execution"})
        self._machine.cancel(execution_id)
        return json_reply(202, {"status": "will_try" if execution_id in self._running else "over"})

    def _device(self, device_id: str) -> Reply:
        if device_id not in self._devices:
            return json_reply(404, {"error": "unknown_device"})
        return json_reply(200, self._shown(device_id))

    def _shown(self, device_id: str) -> dict[str, Any]:
        name = f"lab device {self._devices[device_id]}"
        return {"id": device_id, "name": name, "online": True, "execution_id": self._on_device.get(device_id)}

    def _health(self) -> dict[str, Any]:
        outbox = self.outbox
        return {
            "status": "ok", "simulate": self._config.simulate, "running": len(self._running),
            "outbox": outbox.waiting, "delivered": outbox.delivered, "rejected": outbox.rejected,
        }  # fmt: skip

    def _ledger(self, request: Request) -> Reply:
        """All entries, or those that have what the query asks for (`?device_id=dev-001&event=accepted`)."""
        wanted = request.query.items()
        entries = [row for row in self.ledger.read() if all(str(row.get(name)) == value for name, value in wanted)]
        return json_reply(200, {"entries": entries})

    def _publish(self, request: Request) -> Reply:
        """`{"messages": [...], "sign": true}`: anything at all, through the outbox."""
        try:
            body = msgspec.json.decode(request.body, type=dict[str, Any])
            messages = msgspec.convert(body.get("messages"), list[Any])
        except msgspec.MsgspecError as error:
            return json_reply(422, {"error": "not_understood", "message": str(error)})
        signed = body.get("sign", True)
        self._studio.publish_any(messages, signed=bool(signed))
        return json_reply(202, {"queued": len(messages)})

    def _set_faults(self, method: str, request: Request) -> Reply:
        if method == "DELETE":
            self.faults.clear()
        elif method == "PUT":
            try:
                self.faults.set(request.body)
            except msgspec.MsgspecError as error:
                return json_reply(422, {"error": "not_understood", "message": str(error)})
        elif method != "GET":
            return json_reply(405, {"error": "method_not_allowed"})
        return json_reply(200, {"rules": self.faults.shown()})

    # ------------------------------------------------------------------------------------------------------------ inside

    def _ended(self, execution_id: str) -> None:
        push = self._running.pop(execution_id, None)
        if push is not None and push.device_id is not None and self._on_device.get(push.device_id) == execution_id:
            del self._on_device[push.device_id]

    def _delivered(self, execution_ids: list[Any]) -> None:
        self.ledger.write_many("delivered", [{"execution_id": execution_id} for execution_id in execution_ids])

    def _note_seen(self, execution_id: str) -> None:
        self._seen[execution_id] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _remember(self) -> None:
        """After a restart: ids and fences from the ledger; in real mode what was cut off is reported as failed, and a
        result that did not get through is sent again."""
        accepted: dict[str, dict[str, Any]] = {}
        results: dict[str, dict[str, Any]] = {}
        for row in self.ledger.read():
            execution_id = row.get("execution_id", "")
            if row["event"] == "accepted":
                accepted[execution_id] = row
                self._note_seen(execution_id)
                if row.get("device_id") and row.get("fencing_token"):
                    self._fences[row["device_id"]] = row["fencing_token"]
            elif row["event"] == "result":
                results[execution_id] = row
            elif row["event"] == "delivered":
                accepted.pop(execution_id, None)
        if isinstance(self._machine, Runner):
            for execution_id, row in accepted.items():
                self._report_again(execution_id, row, results.get(execution_id), self._machine)

    def _report_again(self, execution_id: str, row: dict[str, Any], result: dict[str, Any] | None, runner: Runner) -> None:
        if result is not None:
            message = {name: value for name, value in result.items() if name not in ("event", "at")}
            self._studio.publish([message], receipt=execution_id)
            return
        runner.end_left_over(execution_id)
        voice = self._studio.voice_of(execution_id, row["task_id"], row["device_id"], first_seq=SEQ_AFTER_RESTART)
        voice.end("FAILURE", error={"code": "EXECUTION_FAILED", "message": "the lab was restarted"})


def _carrier(config: LabConfig) -> Carrier | None:
    if config.mq_url is not None:
        from scriptdispatch.central.lab_pulsar import PulsarCarrier  # an extra, not on every machine

        return PulsarCarrier(config.mq_url, config.mq_topic)
    return HttpCarrier(config.deliver_url, config.deliver_token) if config.deliver_url else None


def _facts(push: PushRequest) -> dict[str, Any]:
    return {
        "execution_id": push.execution_id, "task_id": push.task_id, "device_id": push.device_id,
        "fencing_token": push.fencing_token, "attempt": push.attempt, "sha256": push.sha256,
    }  # fmt: skip
