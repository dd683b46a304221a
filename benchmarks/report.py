"""The result for people."""

from typing import Any

TARGETS = {"tasks_per_s": 400, "p50": 15.0, "p99": 40.0, "idle": 1.0}


def show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{machine['cores']} cores, SQLite {machine['sqlite']}, Python {machine['python']}, "
          f"one sync {machine['sync_ms']} ms, load average before: {machine['load_average']}")  # fmt: skip
    if "rounds" in result:
        _rounds(result["rounds"])
    if "light" in result:
        _light(result["light"])
    if "lines" in result:
        _lines(result["lines"])
    if "idle" in result:
        _idle(result["idle"])
    if "memory_mb" in result:
        _memory(result["memory_mb"])
    if "where" in result:
        _where(result["where"])


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rounds, key=lambda row: float(row["tasks_per_s"]))


def _rounds(rounds: list[dict[str, Any]]) -> None:
    print(f"\nFull lifecycles, created in batches to `success` (target {TARGETS['tasks_per_s']}/s)")
    print("     tasks   seconds   tasks/s   created/s   lines/s   CPU ms/task   cores busy   load average")
    for row in rounds:
        print(
            f"  {row['tasks']:8} {row['seconds']:9.2f} {row['tasks_per_s']:9.1f} {row['created_per_s']:11.1f} "
            f"{row['log_lines_per_s']:9.1f} {row['cpu_ms_per_task_all']:13.2f} {row['busy_cores']:12.2f} "
            f"{row['load_average']:14.2f}"
        )
    top = best(rounds)
    parts = "   ".join(f"{name} {value:.2f}" for name, value in top["cpu_ms_per_task"].items())
    print(f"  best: {top['tasks_per_s']}/s; CPU ms per task: {parts}")
    print(f"  (the client's own {top['cpu_ms_per_task_client']:.2f} ms are not counted)")


def _light(light: dict[str, Any]) -> None:
    print(
        f"\nLight load, {light['per_second']:g} creates/s, ms (target pushed p50 {TARGETS['p50']:g}, p99 {TARGETS['p99']:g})"
    )
    for name in ("create_to_answer_ms", "create_to_pushed_ms", "create_to_success_ms"):
        values = "   ".join(f"{key} {value:7.2f}" for key, value in light[name].items())
        print(f"  {name.removesuffix('_ms').replace('_', ' '):18} {values}")


def _lines(lines: dict[str, Any]) -> None:
    parts = "   ".join(f"{name} {value}" for name, value in lines["cpu_us_per_line"].items())
    print(f"\nLog lines: {lines['lines']} in {lines['seconds']} s, {lines['lines_per_s']}/s; CPU µs per line: {parts}")


def _idle(idle: dict[str, Any]) -> None:
    print(f"\nIdle for {idle['seconds']} s: {idle['percent_of_a_core']} % of a core (target {TARGETS['idle']:g} %)")
    for name, value in idle["percent_by_process"].items():
        print(f"  {name:12} {value:5.2f} %   {idle['wake_ups_per_s'][name]:6.1f} wake-ups/s")


def _memory(memory: dict[str, dict[str, float]]) -> None:
    print("\nMemory, MB: resident (with the mapped part of the database) and its own")
    for name, row in memory.items():
        if name != "client":
            print(f"  {name:12} {row['rss']:7.1f} {row['own']:7.1f}")


def _where(where: dict[str, Any]) -> None:
    print(f"\nWhere the time goes ({where['tasks']} tasks, {where['tasks_per_s']}/s with the probe in)")
    print("                                                      ms each           share of its time")
    print("  transactions            per task  jobs each    lock   work commit     lock   work commit")
    for name, kinds in where["transactions"].items():
        for kind, row in kinds.items():
            print(
                f"  {name:12} {kind:8} {row['per_task']:10.3f} {row['jobs_each']:10.1f} {row['lock_ms']:7.2f} "
                f"{row['work_ms']:6.2f} {row['commit_ms']:6.2f} {row['lock_share']:8.0%} {row['work_share']:6.0%} "
                f"{row['commit_share']:6.0%}"
            )
    print(
        f"  durable commits (a sync each): {where['syncs_per_s']}/s; work and commit of all processes together take "
        f"{where['in_transactions']:.0%} of the time"
    )
    print("  (work is under the write lock; commit ends with letting it go, and sometimes with a checkpoint after that)")
    print(f"\n  {'jobs':59} per task   µs each   µs/task   ms from call to answer")
    for name, jobs in where["jobs"].items():
        for row in jobs:
            print(
                f"  {name:12} {row['job'][:46]:46} {row['per_task']:8.3f} {row['us_each']:9.1f} "
                f"{row['us_per_task']:9.1f} {row['answer_ms']:10.2f}"
            )
    for name, places in where.get("profile", {}).items():
        print(f"\n  CPU of {name}, µs per task, by place (the innermost frame, then ours below it)")
        for place, us in places:
            print(f"  {us:8.1f}  {place}")
