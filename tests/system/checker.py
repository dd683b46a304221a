"""The independent checker: knows only the lab's ledger, the API's answers and the invariants. Nothing of our code.

`verify` is run after every fault test, once things are quiet. It collects all that is wrong and fails with the list.
"""

import json
import time
from collections import defaultdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

FINAL = {"success", "failed", "canceled"}
# SPEC section 2, written down again on purpose.
MAY_BECOME = {
    None: {"waiting"},
    "waiting": {"running", "paused", "canceled", "failed_waiting_retry", "failed"},
    "running": {"send_success", "success", "failed_waiting_retry", "failed", "canceled", "waiting"},
    "send_success": {"success", "failed_waiting_retry", "failed", "canceled"},
    "failed_waiting_retry": {"running", "failed", "paused", "canceled", "success", "failed_waiting_retry"},
    "paused": {"waiting", "failed_waiting_retry", "canceled", "success"},
    "success": set(),
    "failed": {"waiting", "success"},
    "canceled": {"waiting", "success"},
}
GIVEN_UP = ("TIMEOUT", "LOCK_RELEASED", "CANCELED", "OVERRIDDEN")


class Checker:
    """`settle_s`: how long locks and executions may take to agree after quiet (I7)."""

    def __init__(self, url: str, ledger: Path, *, settle_s: float = 30, lines_per_execution: int | None = None) -> None:
        self._client = httpx.Client(base_url=url + "/api/v1", timeout=30)
        self._ledger_path, self._settle_s, self._lines = ledger, settle_s, lines_per_execution
        self.wrong: list[str] = []

    def verify(self, accepted_ids: list[str]) -> None:
        """Everything that was answered 2xx, against everything that happened."""
        tasks = {task_id: self._task(task_id) for task_id in accepted_ids}
        executions = {task_id: self._items(f"/tasks/{task_id}/executions") for task_id in accepted_ids}
        ledger = self._ledger()
        self._i1_nothing_lost(tasks)
        self._i2_pushed_once(tasks, executions, ledger)
        self._i3_no_overlap(executions, ledger)
        self._i4_fences_rise(ledger)
        self._i5_lines_once(executions, ledger)
        self._i6_transitions(accepted_ids)
        self._i7_locks_are_open_executions()
        self._client.close()
        assert not self.wrong, "\n".join(["the invariants do not hold:", *self.wrong[:30]])

    def _i1_nothing_lost(self, tasks: dict[str, dict[str, Any]]) -> None:
        for task_id, task in tasks.items():
            if task["status"] not in FINAL and not (task["waiting_for"] or {}).get("reason"):
                self.wrong.append(f"I1 {task_id} is {task['status']} and does not say why")

    def _i2_pushed_once(self, tasks: Any, executions: Any, ledger: list[dict[str, Any]]) -> None:
        accepted: dict[str, int] = defaultdict(int)
        owner: dict[str, str] = {}
        for entry in ledger:
            if entry["event"] == "accepted":
                accepted[entry["execution_id"]] += 1
                owner[entry["execution_id"]] = entry["task_id"]
        for execution_id, times in accepted.items():
            if times > 1:
                self.wrong.append(f"I2 execution {execution_id} was accepted {times} times")
        for entry in ledger:
            if entry["event"] == "duplicate":
                self.wrong.append(f"I2 execution {entry['execution_id']} was pushed again")
        for task_id, rows in executions.items():
            attempts = [row["attempt"] for row in rows]
            if len(set(attempts)) != len(attempts):
                self.wrong.append(f"I2 task {task_id} has attempts {attempts}")
            retry = tasks[task_id]["retry"]
            if retry["strategy"] not in ("daily", "forever"):
                pushed = sum(
                    1 for row in rows if row["push"] in ("sent", "unknown") and row["round"] == tasks[task_id]["round"]
                )
                if pushed > 1 + retry["max_retries"]:
                    self.wrong.append(f"I2 task {task_id} was pushed {pushed} times with {retry['max_retries']} retries")
            known = {row["id"] for row in rows}
            for execution_id in accepted:
                if owner[execution_id] == task_id and execution_id not in known:
                    self.wrong.append(f"I2 central control has {execution_id} of task {task_id}, the API does not")

    def _i3_no_overlap(self, executions: Any, ledger: list[dict[str, Any]]) -> None:
        rows = {row["id"]: row for group in executions.values() for row in group}
        ends = {entry["execution_id"]: _time(entry["at"]) for entry in ledger if entry["event"] == "result"}
        by_device: dict[str, list[tuple[datetime, str]]] = defaultdict(list)
        owner = {entry["execution_id"]: entry["task_id"] for entry in ledger if entry["event"] == "accepted"}
        for entry in ledger:
            if entry["event"] == "accepted" and entry.get("device_id"):
                by_device[entry["device_id"]].append((_time(entry["at"]), entry["execution_id"]))
        for device, starts in by_device.items():
            starts.sort()
            for (_, first), (begun, second) in pairwise(starts):
                over = ends.get(first)
                if over is not None and over <= begun:
                    continue
                if first not in rows:  # of a task that this call does not ask about, on an installation that tests share
                    rows |= {row["id"]: row for row in self._items(f"/tasks/{owner[first]}/executions")}
                if not self._given_up_before(rows.get(first), begun):
                    self.wrong.append(f"I3 on {device} {second} began while {first} was running")

    def _given_up_before(self, row: dict[str, Any] | None, begun: datetime) -> bool:
        """Closed by an audited timeout, forced release or forced cancel before."""
        if row is None or row["finished_at"] is None:
            return False
        code = (row["error"] or {}).get("code")
        return code in GIVEN_UP and _time(row["finished_at"]) <= begun

    def _i4_fences_rise(self, ledger: list[dict[str, Any]]) -> None:
        last: dict[str, int] = {}
        for entry in ledger:
            if entry["event"] == "accepted" and entry.get("device_id"):
                fence = entry["fencing_token"]
                if fence <= last.get(entry["device_id"], 0):
                    self.wrong.append(f"I4 fence {fence} on {entry['device_id']} after {last[entry['device_id']]}")
                last[entry["device_id"]] = fence

    def _i5_lines_once(self, executions: Any, ledger: list[dict[str, Any]]) -> None:
        if self._lines is None:
            return
        ended = {entry["execution_id"] for entry in ledger if entry["event"] == "result"}
        for task_id, rows in executions.items():
            for row in rows:
                if row["id"] not in ended:
                    continue
                page = self._client.get(f"/tasks/{task_id}/logs", params={"execution_id": row["id"], "limit": 500}).json()
                seqs = [line["seq"] for line in page["items"]]
                if len(set(seqs)) != len(seqs) or len(seqs) != self._lines:
                    self.wrong.append(f"I5 execution {row['id']} has lines {seqs}, published were {self._lines}")

    def _i6_transitions(self, task_ids: list[str]) -> None:
        for task_id in task_ids:
            status = None
            for row in self._items(f"/tasks/{task_id}/history"):
                if row["to"] is None:
                    continue
                if row["from"] != status:
                    self.wrong.append(f"I6 {task_id}: history goes on from {row['from']}, but it was {status}")
                if row["to"] not in MAY_BECOME[status]:
                    self.wrong.append(f"I6 {task_id}: {status} became {row['to']}")
                status = row["to"]
            if status != self._task(task_id)["status"]:
                self.wrong.append(f"I6 {task_id}: its history ends in {status}")

    def _i7_locks_are_open_executions(self) -> None:
        deadline = time.monotonic() + self._settle_s
        found: list[str] = []
        while True:
            found = self._lock_mismatches()
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        self.wrong += found

    def _lock_mismatches(self) -> list[str]:
        locked = {row["id"]: row["lock"] for row in self._items("/devices", state="busy")}
        held = {device: lock["execution_id"] for device, lock in locked.items() if lock}
        sent = self._items("/tasks", status="running,send_success", limit=500)
        open_rows = {task["device_id"]: task["execution_id"] for task in sent if task["device_id"]}
        return [f"I7 lock of {d}: {held.get(d)}, open execution: {open_rows.get(d)}"
                for d in held.keys() | open_rows.keys() if held.get(d) != open_rows.get(d)]  # fmt: skip

    def _task(self, task_id: str) -> dict[str, Any]:
        answer = self._client.get(f"/tasks/{task_id}")
        assert answer.status_code == 200, f"I1 {task_id}: {answer.text}"
        return dict(answer.json())

    def _items(self, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = self._client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["items"])

    def _ledger(self) -> list[dict[str, Any]]:
        lines = self._ledger_path.read_text().splitlines() if self._ledger_path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
