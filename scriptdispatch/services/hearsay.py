"""What a queue entry tells of its task, so that the first worker to take it need not read it. A fresh one is as good as a
read that was made when the task was created, and W4 compares it all the same; of an older one nothing is believed."""

from datetime import datetime, timedelta
from typing import Final

import msgspec

from scriptdispatch.domain.model import Task

FRESH: Final = timedelta(seconds=5)
LONGEST: Final = 4_000  # characters; a longer one is cheaper to read than to carry
_decoder = msgspec.json.Decoder(Task)


def tell(task: Task) -> str | None:
    """Nothing of secrets: the queue is no place for them."""
    if task.secret_params:
        return None
    text = msgspec.json.encode(task).decode()
    return text if len(text) <= LONGEST else None


def heard(told: str | None, now: datetime) -> Task | None:
    if told is None:
        return None
    try:
        task = _decoder.decode(told)
    except msgspec.DecodeError:  # of another version, which has other fields
        return None
    return task if abs(now - task.updated_at) <= FRESH else None
