"""The faults that a test can switch on in a running lab (`PUT /faults`), and how often each fired.

A rule says what happens to a request (`mode`) or to an execution's messages (`messages`), for which `devices`, on which
`path` (scripts, devices, cancel, all), and how many times (`count`). The first rule that applies is used.
"""

from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from scriptdispatch.central.lab_server import Reply, Wire, json_reply

Mode = Literal[
    "status", "close", "reset", "half_header", "blackhole", "slow", "idle_close", "redirect", "hang_after_accept", "garbage"
]
Messages = Literal[
    "terminal_first", "triple", "contradict", "poison", "unknown_execution", "wrong_device", "forged", "silent", "no_seq"
]
WIRES: Final[dict[str, Wire]] = {
    "close": "close", "reset": "reset", "half_header": "half_header", "blackhole": "never", "slow": "slow",
}  # fmt: skip
EXECUTES: Final = ("close", "reset", "half_header", "slow", "idle_close", "hang_after_accept")


class Rule(Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Mode | None = None
    messages: Messages | None = None
    path: Literal["scripts", "devices", "cancel", "all"] = "scripts"
    devices: list[str] | None = None
    count: int | None = None  # times left; None: always
    execute: bool | None = None  # carry the request out before misbehaving; None: as the mode does by nature
    status: int = 503
    body: str = ""
    retry_after: str | int | float | None = None
    location: str = "http://169.254.169.254/"
    after_s: float = 1.0
    seconds: float = 29.0
    fired: int = 0

    @property
    def executes(self) -> bool:
        return self.mode in EXECUTES if self.execute is None else self.execute

    def applies(self, device_id: str | None) -> bool:
        return (self.count is None or self.fired < self.count) and (self.devices is None or device_id in self.devices)


class Faults:
    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def set(self, body: bytes) -> None:
        """One rule or a list of them, in place of all that were there. Raises msgspec.ValidationError."""
        given = msgspec.json.decode(body, type=Rule | list[Rule])
        self.rules = given if isinstance(given, list) else [given]

    def clear(self) -> None:
        self.rules = []

    def shown(self) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = msgspec.to_builtins(self.rules)
        return shown

    def for_request(self, path: str, device_id: str | None) -> Rule | None:
        for rule in self.rules:
            if rule.mode is not None and rule.path in (path, "all") and rule.applies(device_id):
                rule.fired += 1
                return rule
        return None

    def for_messages(self, device_id: str | None) -> Messages | None:
        for rule in self.rules:
            if rule.messages is not None and rule.applies(device_id):
                rule.fired += 1
                return rule.messages
        return None


def misbehaving(rule: Rule, proper: Reply | None) -> Reply:
    """The reply that the rule makes of the proper one (None: the request was not carried out)."""
    reply = proper or Reply(202, b"{}")
    if rule.mode == "status":
        headers = [] if rule.retry_after is None else [("Retry-After", str(rule.retry_after))]
        body = rule.body.encode() or msgspec.json.encode({"error": "injected"})
        return Reply(rule.status, body, headers)
    if rule.mode == "redirect":
        return json_reply(302, {}, headers=[("Location", rule.location)])
    if rule.mode == "idle_close":
        return msgspec.structs.replace(reply, idle_close_s=rule.after_s)
    if rule.mode == "hang_after_accept":
        return msgspec.structs.replace(reply, after_s=rule.seconds)
    if rule.mode == "garbage":
        return Reply(200, b"\x00 not json \xff")
    assert rule.mode is not None
    return msgspec.structs.replace(reply, wire=WIRES[rule.mode])
