"""The lab's ledger: what central control was asked and did, one JSON line each, written through at once.

A checker that trusts nobody else reads `<folder>/ledger.jsonl`, also after the lab was killed. It is not synced to disk:
a killed process loses nothing, a power cut may.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

Entry = dict[str, Any]


class Ledger:
    """Events: `accepted`, `duplicate`, `refused`, `cancel`, `result` (a terminal message was made), and in real mode
    `delivered` (it reached the API)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "ledger.jsonl"
        self._encoder = msgspec.json.Encoder()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._end_torn_line()

    def write(self, event: str, **facts: Any) -> None:
        self.write_many(event, [facts])

    def write_many(self, event: str, rows: list[Entry]) -> None:
        at = datetime.now(UTC).isoformat()
        lines = b"".join(self._encoder.encode({"event": event, "at": at, **facts}) + b"\n" for facts in rows)
        while lines:  # a write to a file is short only when the disk is full; the next one then says so
            lines = lines[os.write(self._fd, lines) :]

    def read(self) -> list[Entry]:
        """All entries so far. A line that a crash tore is left out."""
        entries = []
        for line in self.path.read_bytes().splitlines():
            try:
                entries.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue
        return entries

    def close(self) -> None:
        os.close(self._fd)

    def _end_torn_line(self) -> None:
        """A lab that was killed inside a write must not spoil the next line as well."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                os.write(self._fd, b"\n")
