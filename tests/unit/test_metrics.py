from scriptdispatch.metrics import PHASE_BUCKETS, Metrics, add


def test_snapshots_of_two_processes_add_up() -> None:
    left, right = Metrics(), Metrics()
    left.finish("script", "success", None)
    right.finish("script", "success", None)
    right.finish("script", "failed", "TIMEOUT")
    left.observe("run", 30)
    right.observe("run", 10_000_000)
    right.counts["quarantined_total"] += 2
    total = add(left.snapshot(), right.snapshot())
    assert total["finished_total"] == {"script|success|": 2, "script|failed|TIMEOUT": 1}
    assert total["phase_seconds"]["run"]["count"] == 2
    assert total["phase_seconds"]["run"]["buckets"][-1] == 1
    assert total["phase_seconds"]["run"]["buckets"][PHASE_BUCKETS.index(0.05)] == 1
    assert total["quarantined_total"] == 2
