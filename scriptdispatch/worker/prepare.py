"""Everything about an execution that can be made ready before anything is written: text, hash, request body."""

import hashlib

from msgspec import Struct

from scriptdispatch.central.client import PushRequest
from scriptdispatch.domain.model import Error, Execution, Task
from scriptdispatch.domain.render import MissingParam, render
from scriptdispatch.services.scripts import Scripts


class Prepared(Struct, frozen=True, kw_only=True):
    """The text to push; or, with `error`, why there is none (then the execution is closed `refused`)."""

    language: str = ""
    text: str = ""
    sha256: str | None = None
    error: Error | None = None


class Preparer:
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def prepare(self, task: Task) -> Prepared:
        script = await self._scripts.get(task.script_id) if task.script_id is not None else None
        if script is None:
            return _refused("INTERNAL_ERROR", f"its script {task.script_id} is not in the store")
        if hashlib.sha256(script.content.encode()).hexdigest() != script.sha256:
            return _refused("INTERNAL_ERROR", "the stored script does not match its hash; it was changed from outside")
        try:
            text = render(script.content, task.params)
        except MissingParam as error:
            return _refused("DISPATCH_FAILED", str(error))
        sha256 = script.sha256 if text is script.content else hashlib.sha256(text.encode()).hexdigest()
        return Prepared(language=script.language, text=text, sha256=sha256)


def request_of(task: Task, execution: Execution, prepared: Prepared) -> PushRequest:
    return PushRequest(
        execution_id=execution.id,
        task_id=task.id,
        device_id=execution.device_id,
        language=prepared.language,
        script=prepared.text,
        sha256=prepared.sha256 or "",
        params=task.params,
        timeout_seconds=execution.timeout_seconds,
        attempt=execution.attempt,
        fencing_token=execution.fencing_token,
    )


def _refused(code: str, message: str) -> Prepared:
    return Prepared(error=Error(code=code, message=message))
