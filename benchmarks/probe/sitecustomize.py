"""Looks into the product's processes while they are measured. Not part of the product: Python loads this file by its name
when `benchmarks/run.py` puts this folder on PYTHONPATH (`--where`, `--profile`), in every process of the run.

It wraps the doors of `scriptdispatch.sqlite` and counts, by kind of job: how many, how long the statements ran, how long
callers waited; and for each transaction the wait for the write lock, the jobs, the commit. With a file `profile.<pid>` in
the folder it also samples that process: each thread's CPU time since the last look goes to what it is doing now.
A thread looks into the folder ten times a second, so nothing idle is to be measured with it.
"""

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("BENCH_PROBE") or ".")
LOOK_S = 0.1
SAMPLE_S = 0.002
IDLE = {("runners.py", "run"), ("sqlite.py", "_drain")}  # a thread that is here has nothing to do
DEPTH = 3  # frames of ours that name a sample


class Tally:
    """What happened since the last snapshot. Written by several threads; a count lost to a race does no harm here."""

    def __init__(self) -> None:
        self.transactions: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0, 0.0])  # n, jobs, lock, work, commit
        self.jobs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])  # n, running, from call to answer
        self.samples: Counter[str] = Counter()

    def facts(self) -> dict[str, Any]:
        return {"transactions": self.transactions, "jobs": self.jobs, "samples": self.samples}


tally = Tally()


def name_of(job: Any) -> str:
    """What a job does, by the function behind it; for a commit of the store, by its changes."""
    job = getattr(job, "func", job)
    cells = [cell.cell_contents for cell in job.__closure__ or ()]
    steps = next((c for c in cells if isinstance(c, list) and c and callable(c[0])), [])
    kinds = "+".join(dict.fromkeys(step.__qualname__.split(".")[0].strip("_") for step in steps))
    module = job.__module__.removeprefix("scriptdispatch.").removesuffix(".sqlite")
    name = job.__qualname__.replace("<locals>.", "").removesuffix(".<lambda>").removesuffix(".job")
    return f"{module}.{name.rpartition('.')[2].strip('_')}" + (f"({kinds})" if kinds else "")


def timed(job: Any, times: list[float]) -> Any:
    row = tally.jobs[name_of(job)]

    def run(db: Any) -> Any:
        began = time.perf_counter()
        times.append(began)
        try:
            return job(db)
        finally:
            ended = time.perf_counter()
            times.append(ended)
            row[0] += 1
            row[1] += ended - began

    return run


def wrap(sqlite: Any) -> None:
    transact, write, read = sqlite._transact, sqlite.Database.write, sqlite.Database.read

    def measured_transact(db: Any, batch: list[Any]) -> Any:
        times: list[float] = []
        plain = [work.job for work in batch]
        for work in batch:
            work.job = timed(work.job, times)
        began = time.perf_counter()
        try:
            return transact(db, batch)
        finally:
            ended = time.perf_counter()
            for work, job in zip(batch, plain, strict=True):
                work.job = job
            row = tally.transactions["durable" if any(work.durable for work in batch) else "relaxed"]
            first, last = (times[0], times[-1]) if times else (ended, ended)
            for i, value in enumerate((1, len(batch), first - began, last - first, ended - last)):
                row[i] += value

    async def measured_write(self: Any, job: Any, **rest: Any) -> Any:
        row, began = tally.jobs[name_of(job)], time.perf_counter()
        try:
            return await write(self, job, **rest)
        finally:
            row[2] += time.perf_counter() - began

    async def measured_read(self: Any, job: Any, **rest: Any) -> Any:
        row, began = tally.jobs[name_of(job)], time.perf_counter()
        try:
            return await read(self, timed(job, []), **rest)
        finally:
            row[2] += time.perf_counter() - began

    sqlite._transact, sqlite.Database.write, sqlite.Database.read = measured_transact, measured_write, measured_read


def watch() -> None:
    """Runs in its own thread: answers snapshots, and samples when asked to."""
    global tally
    number, mine = 0, FOLDER / f"profile.{os.getpid()}"
    seen: dict[int, float] = {}
    while True:
        sampling = mine.exists()
        if sampling:
            for _ in range(int(LOOK_S / SAMPLE_S)):
                sample(seen)
                time.sleep(SAMPLE_S)
        else:
            time.sleep(LOOK_S)
        if (FOLDER / f"snapshot.{number + 1}").exists():
            number += 1
            done, tally = tally, Tally()
            part = FOLDER / f"{os.getpid()}.{number}.part"
            part.write_text(json.dumps(done.facts()))
            part.rename(part.with_suffix(".json"))


def sample(seen: dict[int, float]) -> None:
    me = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        try:
            cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
        except OSError:
            continue  # it has ended
        spent, seen[thread] = cpu_s - seen.get(thread, cpu_s), cpu_s
        if thread != me and spent > 0:
            tally.samples[place(frame)] += int(spent * 1e6)


def place(frame: Any) -> str:
    """The innermost frame, and below it the frames of our own code that led there."""
    code = frame.f_code
    if (Path(code.co_filename).name, code.co_name) in IDLE:
        return "(over before it was seen)"
    names = [f"{Path(code.co_filename).name}:{code.co_name}"]
    while (frame := frame.f_back) is not None and len(names) < DEPTH:
        if "scriptdispatch" in frame.f_code.co_filename:
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
    return " < ".join(names)


if os.environ.get("BENCH_PROBE"):
    from scriptdispatch import sqlite

    wrap(sqlite)
    threading.Thread(target=watch, name="probe", daemon=True).start()
