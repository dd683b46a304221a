"""One worker's view of central control: when to stop asking. Pure, no I/O.

The master hears of it (`wire.CentralSeen`) and opens the breaker for the cluster: then nothing is handed out or charged
until a probe finds central control well.
"""

from typing import Final

from scriptdispatch.central.outcomes import PushAnswer

OPENS_AFTER: Final = 5  # connect failures in a row


class Breaker:
    def __init__(self) -> None:
        self._failures = 0
        self.reason: str | None = None

    @property
    def open(self) -> bool:
        return self.reason is not None

    def note(self, answer: PushAnswer) -> bool:
        """Count one answer. True: this one opened the breaker. An open breaker only closes by `close`."""
        if self.open:
            return False
        if answer.outcome == "misconfigured":
            self.reason = answer.message
        elif answer.connect_failed:
            self._failures += 1
            if self._failures >= OPENS_AFTER:
                self.reason = f"{self._failures} connect failures in a row, the last: {answer.message}"
        elif answer.http_status is not None:
            # Any answer shows that it can be reached. A push that broke off, or was never begun, shows nothing.
            self._failures = 0
        return self.open

    def close(self) -> None:
        self._failures, self.reason = 0, None
