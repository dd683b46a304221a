"""What may be sent: the request bodies of the API, field by field (SPEC 4.1). pydantic at the edge, and nowhere else.

Strict: a number is not a string, an object is not a name, and a field that this version does not have is an error that
names it. So nothing but the listed types ever reaches a store (S04).
"""

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from scriptdispatch.domain.model import Language, Priority, Retry, Status, Strategy
from scriptdispatch.errors import Refused
from scriptdispatch.services.fields import all_invalid, field_errors, invalid, parse_time, plain

MONTH_S = 30 * 86_400
SCRIPT_ID = "^[0-9a-f]{64}$"


def _device(value: str) -> str:
    if value.startswith("~"):
        raise ValueError("must not start with '~'")
    return plain(value)


def _script_id(value: str) -> str:
    if not re.fullmatch(SCRIPT_ID, value):
        raise ValueError("must be 64 hexadecimal digits, as `script_id` of a task")
    return value


def _no_operator(value: str) -> str:
    """Some stores read a name that starts with '$' as a command."""
    if value.startswith("$"):
        raise ValueError("a name must not start with '$'")
    return value


def _label_key(value: str) -> str:
    if ":" in value:
        raise ValueError("must not contain ':'")
    return plain(_no_operator(value))


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(plain)]
DeviceId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_device)]
ScriptId = Annotated[str, Field(json_schema_extra={"pattern": SCRIPT_ID}), AfterValidator(_script_id)]
LabelKey = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_label_key)]
LabelValue = Annotated[str, Field(max_length=200), AfterValidator(plain)]
ParamName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_no_operator)]
Reason = Annotated[str, Field(max_length=1000), AfterValidator(plain)]
Scope = Literal["task:read", "task:write", "device:read", "lock:force", "type:write", "log:write", "admin"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class ScriptBody(Body):
    language: Language
    content: str


class RetryBody(Body):
    strategy: Strategy = "fixed"
    max_retries: int = Field(3, ge=0, le=1000)
    delay_seconds: float = Field(10.0, ge=0, le=MONTH_S)
    backoff_rate: float = Field(2.0, ge=1, le=100)
    max_delay_seconds: float = Field(3600.0, ge=0, le=MONTH_S)
    per_day: int = Field(3, ge=1, le=1000)
    jitter: bool = True

    def record(self) -> Retry:
        return Retry(**self.model_dump())


class TaskBody(Body):
    """The body of `POST /tasks`. `script` or `script_id` is required."""

    name: Name | None = None
    type: str = Field("script", min_length=1, max_length=200)
    device_id: DeviceId | None = None
    script: ScriptBody | None = None
    script_id: ScriptId | None = None
    params: dict[ParamName, Any] | None = None
    secret_params: list[ParamName] = Field(default_factory=list, max_length=1000)
    priority: Priority = "normal"
    run_at: str | None = Field(None, description="RFC 3339 with an offset; in the past runs now; at most 5 years ahead")
    timeout_seconds: int | None = Field(None, ge=1, le=604_800)
    retry: RetryBody | None = None
    dedupe_key: Name | None = None
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)

    @field_validator("run_at")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None:
            parse_time(value)
        return value

    @property
    def due(self) -> datetime | None:
        return None if self.run_at is None else parse_time(self.run_at)


class BatchBody(Body):
    """The body of `POST /tasks/batch`. Each of `tasks` is checked on its own."""

    tasks: list[Any] = Field(min_length=1, max_length=1000)


class ActionBody(Body):
    """The optional body of an action on a task."""

    reason: Reason = ""
    expected_status: Status | None = None


class MessagesBody(Body):
    """The body of `POST /execution-logs`. Each of `messages` is checked on its own (SPEC 6)."""

    messages: list[Any] = Field(max_length=1000)


class TokenBody(Body):
    """The body of `POST /tokens`."""

    name: Name
    scopes: list[Scope] = Field(min_length=1, max_length=20)
    expires_at: str | None = None

    @field_validator("expires_at")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None:
            parse_time(value)
        return value


def task_body(body: Any) -> TaskBody:
    """The body of one task, or `Refused` naming each wrong field."""
    if not isinstance(body, dict):
        raise invalid("body", "must be a JSON object")
    try:
        parsed = TaskBody.model_validate(body)
    except ValidationError as error:
        raise all_invalid(field_errors(error.errors(include_url=False, include_input=False))) from None
    if parsed.type != "script":
        detail = f"there is no task type {parsed.type[:100]!r}; this version has: script"
        raise Refused(422, "type_not_found", detail, [("type", detail)])
    if (parsed.script is None) == (parsed.script_id is None):
        raise invalid("script", "one of script and script_id is required")
    return parsed
