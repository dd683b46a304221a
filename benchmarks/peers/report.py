"""What was measured, for people: a line for each run while it goes on, a table in Markdown at the end."""

from statistics import median
from typing import Any

from cost import percentile

OUTSIDE = ("stub", "pulsar")  # central control and the broker between it and us: the peers have no broker
Row = dict[str, Any]


def progress(row: Row) -> None:
    light = row["light_ms"]
    print(
        f"round {row['round']}  {row['name']:22} {row['tasks_per_s']:7.1f} tasks/s  {_ms(row['cpu_us']):5.2f} ms CPU  "
        f"pushed p50 {percentile(light, 0.5):6.1f} p99 {percentile(light, 0.99):6.1f} ms  load {row['load_average']}"
        + "".join(f"\n    does not count: {wrong}" for wrong in row["wrong"]),
        flush=True,
    )


def show(rows: list[Row], ours: tuple[str, ...]) -> None:
    good = [row for row in rows if not row["wrong"]]
    names = list(dict.fromkeys(row["name"] for row in good))
    rates = {name: median(_of(good, name, "tasks_per_s")) for name in names}
    best = max((rate for name, rate in rates.items() if name not in ours), default=None)
    print("\n| | tasks/s, median (range) | against the best peer | created/s | CPU ms per task | without stub and broker "
          "| create → pushed p50 / p99 ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name in sorted(names, key=lambda name: rates[name]):
        mine = [row for row in good if row["name"] == name]
        light = [ms for row in mine for ms in row["light_ms"]]
        speeds = _of(good, name, "tasks_per_s")
        print(
            f"| {name} | {rates[name]:,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f}) | "
            f"{f'{rates[name] / best:.2f}×' if best else '–'} | {median(_of(good, name, 'created_per_s')):,.0f} | "
            f"{median(_ms(row['cpu_us']) for row in mine):.2f} | {median(_inside_ms(row['cpu_us']) for row in mine):.2f} | "
            f"{percentile(light, 0.5):.1f} / {percentile(light, 0.99):.1f} |"
        )
    _parts(good, names)
    _ours(good, ours)
    if len(good) < len(rows):
        print(f"\n{len(rows) - len(good)} of {len(rows)} runs were not right and do not count.")


def _parts(rows: list[Row], names: list[str]) -> None:
    """CPU by kind of process."""
    print("\nCPU µs per task:")
    for name in names:
        mine = [_by_kind(row["cpu_us"]) for row in rows if row["name"] == name]
        parts = {kind: median(cost[kind] for cost in mine) for kind in mine[0]}
        print(
            f"  {name:22} " + "  ".join(f"{kind} {us:.0f}" for kind, us in sorted(parts.items(), key=lambda part: -part[1]))
        )


def _ours(good: list[Row], ours: tuple[str, ...]) -> None:
    """The ratio of each round is to the best peer of that round: what else the machine did hit them alike."""
    rows = [row for row in good if row["name"] in ours]
    if not rows:
        return
    lines = [row["lines_per_s"] for row in rows]
    print(f"\nOne consumer stores {median(lines):,.0f} log lines/s ({min(lines):,.0f}–{max(lines):,.0f}).")
    for row in rows:
        others = [one for one in good if one["round"] == row["round"] and one["name"] not in ours]
        if others:
            best = max(others, key=lambda one: float(one["tasks_per_s"]))
            times = row["tasks_per_s"] / best["tasks_per_s"]
            print(f"Round {row['round']}: {row['name']} {times:.2f}× of {best['name']}, the best peer.")


def _of(rows: list[Row], name: str, field: str) -> list[float]:
    return [row[field] for row in rows if row["name"] == name]


def _by_kind(cost: dict[str, float]) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for role, us in cost.items():
        kind = role.split()[0]
        kinds[kind] = kinds.get(kind, 0.0) + us
    return kinds


def _ms(cost: dict[str, float]) -> float:
    return sum(cost.values()) / 1000


def _inside_ms(cost: dict[str, float]) -> float:
    return sum(us for role, us in cost.items() if role not in OUTSIDE) / 1000
