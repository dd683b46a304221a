"""From the options of `task create` to the body of POST /tasks."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scriptdispatch.cli.session import wrong
from scriptdispatch.cli.times import parse_when, rfc3339
from scriptdispatch.clock import SystemClock

SUFFIXES = {".sh": "shell", ".bash": "shell", ".py": "python"}
NAME_LENGTH = 200


def script(file: str | None, text: str | None, language: str | None) -> tuple[dict[str, str], str]:
    """The script and a name for it, from a file, stdin (`-`) or the option itself."""
    if (file is None) == (text is None):
        raise wrong("--file", "give the script with --file PATH (- for stdin) or with --script-text")
    if file is None:
        assert text is not None
        content, name = text, next((line.strip() for line in text.splitlines() if line.strip()), "script")[:60]
    elif file == "-":
        content, name = sys.stdin.read(), "stdin"
    else:
        content, name = _read(file), Path(file).name
    return {"language": language or guess_language(file, content), "content": content}, name[:NAME_LENGTH]


def guess_language(file: str | None, content: str) -> str:
    """From the suffix, then from the first line. A text without a file is shell unless its first line says otherwise."""
    suffix = Path(file).suffix.lower() if file and file != "-" else ""
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    first = content.split("\n", 1)[0]
    if first.startswith("#!"):
        words = first[2:].replace("/", " ").split()
        program = next((word for word in reversed(words) if not word.startswith("-") and word != "env"), "")
        if program.startswith("python"):
            return "python"
        if program in ("sh", "bash", "dash", "ash", "ksh", "zsh"):
            return "shell"
    elif file in (None, "-"):
        return "shell"
    raise wrong("--language", "cannot tell the language of the script: add --language shell or --language python")


def params(given: Sequence[str] | None, secret: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """`k=v` is text, `k:=v` is JSON. The names of the secret ones come second."""
    values = dict(_param("--param", pair) for pair in given or ())
    hidden = dict(_param("--secret", pair) for pair in secret or ())
    return {**values, **hidden}, list(hidden)


def labels(given: Sequence[str] | None) -> dict[str, str]:
    return dict(pair_of("--label", pair) for pair in given or ())


def pair_of(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise wrong(option, f"{text!r} is not NAME=VALUE")
    return name, value


def run_at(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return rfc3339(parse_when(text, SystemClock().now()))
    except ValueError as error:
        raise wrong("--at", str(error)) from None


def without_none(body: dict[str, Any]) -> dict[str, Any]:
    """What was not given is left to the server."""
    return {name: value for name, value in body.items() if value is not None and value != {} and value != []}


def _param(option: str, text: str) -> tuple[str, Any]:
    name, value = pair_of(option, text)
    if not name.endswith(":"):
        return name, value
    try:
        return name[:-1], json.loads(value)
    except ValueError:
        raise wrong(option, f"{text!r}: after := comes JSON, e.g. count:=3") from None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise wrong("--file", f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise wrong("--file", f"cannot read {file}: {error.strerror}") from None
