"""Rendering of params into a script: `{{ name }}` and `{{ name|quote }}`, nothing else (SPEC 4.1)."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

_PLACE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*(\|\s*quote\s*)?\}\}")


class MissingParam(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"the script uses {{{{ {name} }}}}, but params has no {name!r}")
        self.name = name


def render(content: str, params: Mapping[str, Any] | None) -> str:
    """The text to push. Without params the content is left as it is, braces and all."""
    if params is None:
        return content

    def fill(match: re.Match[str]) -> str:
        name, quote = match.groups()
        if name not in params:
            raise MissingParam(name)
        text = as_text(params[name])
        return shlex.quote(text) if quote else text

    return _PLACE.sub(fill, content)


def placeholders(content: str) -> list[str]:
    """The names the script asks for, in order of appearance, each once."""
    return list(dict.fromkeys(match.group(1) for match in _PLACE.finditer(content)))


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
