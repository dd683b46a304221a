"""Is this text a script of its language? `bash -n` and Python's `compile`; nothing is ever run.

Verdicts are cached by hash: a check costs more than a whole task may. Where no checker is at hand (bash is not
installed, or takes too long) there is no verdict, and the script is accepted.
"""

import asyncio
import hashlib
import os
import re
import shutil
import sys
import warnings
from collections import OrderedDict

from msgspec import Struct

CACHE = 4096
TIME_LIMIT_S = 5.0
AT_ONCE = 4
INLINE = 32 * 1024  # a Python text up to this size is compiled here; a longer one would hold up the loop
_COMPILE = (
    "import sys,warnings; warnings.simplefilter('ignore')\n"
    "try: compile(sys.stdin.buffer.read().decode(), 'script', 'exec', dont_inherit=True)\n"
    "except SyntaxError as e: print(f'line {e.lineno}: {e.msg}', file=sys.stderr); sys.exit(2)\n"
    "except (ValueError, RecursionError, MemoryError) as e:\n"
    "    print(str(e) or 'too deeply nested', file=sys.stderr); sys.exit(2)\n"
)


class Verdict(Struct, frozen=True):
    """`ok` None: no checker was at hand. `message` may quote the script, `line` never does."""

    ok: bool | None
    message: str | None = None
    line: int | None = None


NO_VERDICT = Verdict(None)


class SyntaxChecker:
    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def verdict(self, language: str, text: str) -> Verdict:
        if "\0" in text:
            return Verdict(False, "the script contains a NUL character")
        key = hashlib.sha256(f"{language}\0{text}".encode()).digest()
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known
        found = await self._check(language, text)
        if found.ok is not None:
            self._cache[key] = found
            if len(self._cache) > CACHE:
                self._cache.popitem(last=False)
        return found

    async def _check(self, language: str, text: str) -> Verdict:
        if language == "python" and len(text) <= INLINE:
            return _compile(text)
        if language == "python":
            command = [sys.executable, "-I", "-S", "-c", _COMPILE]
        elif (bash := shutil.which("bash")) is not None:
            command = [bash, "--norc", "--noprofile", "-n"]
        else:
            return NO_VERDICT
        async with self._slots:
            return await _ask(command, text.encode())


def _compile(text: str) -> Verdict:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "script", "exec", dont_inherit=True)
    except SyntaxError as error:
        return Verdict(False, f"line {error.lineno}: {error.msg}", error.lineno)
    except (ValueError, RecursionError, MemoryError) as error:
        return Verdict(False, str(error) or "too deeply nested")
    return Verdict(True)


async def _ask(command: list[str], text: bytes) -> Verdict:
    """Feeds the text to a checker, which answers by its exit code. A clean environment: no BASH_ENV is read."""
    env = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"}
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=null, stderr=pipe, env=env)
    except OSError:
        return NO_VERDICT
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            _, errors = await process.communicate(text)
    except TimeoutError:
        return NO_VERDICT
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return Verdict(True)
    return _complaint(errors.decode(errors="replace"))


def _complaint(errors: str) -> Verdict:
    first = next((line for line in errors.splitlines() if line.strip()), "syntax error")
    first = re.sub(r"^(\S*bash: )", "", first)
    number = re.search(r"line (\d+)", first)
    return Verdict(False, first[:300], int(number.group(1)) if number else None)
