"""The rooms of the house, by what their files import: who may know whom, and which library lives where."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "scriptdispatch"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [path.relative_to(PACKAGE).as_posix() for path in FILES]

# Each foreign library in its one file or room (a prefix of the path). Its exceptions become ours there.
HOMES: dict[str, tuple[str, ...]] = {
    "apsw": ("sqlite.py",),
    "sqlite3": (),
    "httptools": ("central/",),
    "apscheduler": ("master/",),
    "pulsar": ("mq/pulsar",),
    "pymongo": ("store/mongo",),
    "bson": ("store/mongo",),
    "redis": ("redis_client.py",),
    "fastapi": ("web/",),
    "fastapi_swagger": ("web/",),
    "starlette": ("web/",),
    "uvicorn": ("web/", "central/lab"),
    "typer": ("cli/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "httpx": ("client", "cli/"),
    "pydantic": ("settings.py", "web/", "services/"),
    "pydantic_settings": ("settings.py",),
    "prometheus_client": ("web/", "metrics.py"),
    "structlog": ("logs.py",),
    "setproctitle": ("processes.py",),
}
# Which rooms a room must not know.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "services/": ("web", "cli", "master", "worker"),
    "worker/": ("web", "cli", "master"),
    "mq/": ("web", "cli", "master", "worker"),
    "master/": ("web", "cli"),
    "web/": ("cli", "master", "worker"),
    "central/": ("web", "cli", "master", "worker", "services", "store", "queue", "locks"),
    "store/": ("web", "cli", "master", "worker", "services", "queue", "locks", "mq", "central"),
    "queue/": ("web", "cli", "master", "worker", "services", "store", "mq", "central"),
    "locks/": ("web", "cli", "master", "worker", "services", "store", "mq", "central"),
}
PURE = {
    "collections", "contextlib", "dataclasses", "datetime", "enum", "functools", "hashlib", "itertools", "json", "math",
    "re", "shlex", "typing",
}  # fmt: skip
ROOMS_WITH_PORTS = ("store", "queue", "locks", "mq")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(), name)


def imports(name: str) -> Iterator[str]:
    """Every module that the file imports, also inside functions; `from a.b import c` counts as a.b and a.b.c."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(name: str) -> set[str]:
    """Modules of ours, as paths without suffix: `store/port`."""
    found = {module.removeprefix("scriptdispatch.") for module in imports(name) if module.startswith("scriptdispatch.")}
    return {module.replace(".", "/") for module in found}


def foreign(name: str) -> set[str]:
    tops = {module.partition(".")[0] for module in imports(name)}
    return {top for top in tops if top not in sys.stdlib_module_names and top != "scriptdispatch"} | (tops & {"sqlite3"})


def rooms_of(name: str) -> set[str]:
    return {module.partition("/")[0] for module in ours(name)}


def files_in(room: str) -> list[str]:
    return [name for name in NAMES if name.startswith(room)]


@pytest.mark.parametrize("name", files_in("domain/"))
def test_the_domain_knows_only_itself_and_pure_modules(name: str) -> None:
    tops = {module.partition(".")[0] for module in imports(name)} - {"scriptdispatch"}
    assert tops <= PURE | {"msgspec"}
    assert rooms_of(name) <= {"domain"}


@pytest.mark.parametrize("name", files_in("domain/"))
def test_the_domain_reads_no_clock_draws_no_numbers_and_opens_nothing(name: str) -> None:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("now", "utcnow", "today"), f"{name}:{node.lineno} reads the clock"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input", "exec", "eval"), f"{name}:{node.lineno}"


@pytest.mark.parametrize("room", ROOMS_WITH_PORTS)
def test_a_port_knows_only_the_domain(room: str) -> None:
    assert rooms_of(f"{room}/port.py") <= {"domain"}
    assert foreign(f"{room}/port.py") <= {"msgspec"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "wiring.py"])
def test_only_wiring_knows_which_implementation_is_used(name: str) -> None:
    """A room may look into its own files, and locks live with the queue; nobody else sees a backend."""
    backends = {
        module
        for module in ours(name)
        for room in ROOMS_WITH_PORTS
        if module.startswith((f"{room}/memory", f"{room}/sqlite"))
    }
    neighbours = {"locks": ("locks/", "queue/")}
    room = name.partition("/")[0]
    seen = {module for module in backends if not module.startswith(neighbours.get(room, (f"{room}/",)))}
    assert not seen, f"{name} imports {seen}: ask for the port, wiring.py brings the implementation"


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_library_appears_only_in_its_room(name: str) -> None:
    for library in foreign(name) & HOMES.keys():
        assert name.startswith(HOMES[library]) if HOMES[library] else False, f"{library} does not belong into {name}"


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_does_not_know_the_rooms_that_use_it(room: str) -> None:
    for name in files_in(room):
        assert not rooms_of(name) & set(FORBIDDEN[room]), f"{name} must not know {rooms_of(name) & set(FORBIDDEN[room])}"


def test_no_file_is_imported_in_a_circle() -> None:
    """At module level; an import inside a function is somebody saying that he knows."""
    graph = {name.removesuffix(".py").removesuffix("/__init__"): _at_top(name) for name in NAMES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for other in graph.get(module, ()):
            visit(other, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def _at_top(name: str) -> set[str]:
    modules = {path.removesuffix(".py") for path in NAMES}
    found: set[str] = set()
    for node in tree_of(name).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scriptdispatch"):
            base = (node.module or "").removeprefix("scriptdispatch").lstrip(".").replace(".", "/")
            inside = {f"{base}/{alias.name}".lstrip("/") for alias in node.names} & modules
            found |= inside or ({base} & modules)
    return found


def test_every_dependency_of_the_code_is_declared() -> None:
    import tomllib

    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {_distribution(line) for group in groups for line in group}
    used = {library for name in NAMES for library in foreign(name)} - {"sqlite3"}
    # They come with those we declare: starlette with fastapi, click with typer, bson with pymongo.
    assert {_distribution(library) for library in used} <= declared | {"starlette", "click", "bson"}


def _distribution(line: str) -> str:
    name = line.split(";")[0].split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip().replace("_", "-").lower()
    return {"pulsar": "pulsar-client"}.get(name, name)
