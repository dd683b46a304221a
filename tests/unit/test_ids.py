import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch import ids


def test_an_id_is_a_uuid_of_version_7_with_the_time_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_last", 0)
    monkeypatch.setattr(ids.time, "time", lambda: 1_763_467_200.123)
    made = uuid.UUID(ids.new_id())
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_763_467_200_123


def test_ids_of_one_process_rise_also_within_one_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids.time, "time", lambda: 1_763_467_200.0)
    made = [ids.new_id() for _ in range(10_000)]
    assert made == sorted(set(made))


def test_ids_rise_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids.new_id()
    monkeypatch.setattr(ids.time, "time", lambda: 0.0)
    assert ids.new_id() > before


def test_threads_never_get_the_same_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [one for chunk in pool.map(lambda _: [ids.new_id() for _ in range(1000)], range(8)) for one in chunk]
    assert len(set(made)) == 8000


def test_ours_are_told_from_what_somebody_else_put_into_a_lock() -> None:
    assert ids.is_id(ids.new_id())
    for value in ("", "maintenance", str(uuid.uuid4()), ids.new_id().upper(), ids.new_id() + " ", ids.new_id() + "\n"):
        assert not ids.is_id(value)


def test_a_repeated_request_chooses_the_same_ids_in_order() -> None:
    seed = ids.new_id()
    first = [ids.derived_id(seed, index) for index in range(1000)]
    assert first == [ids.derived_id(seed, index) for index in range(1000)]
    assert first == sorted(set(first))
    assert all(ids.is_id(one) for one in first)


@given(st.integers(0, 999))
def test_another_seed_gives_other_ids(index: int) -> None:
    assert ids.derived_id(ids.new_id(), index) != ids.derived_id(ids.new_id(), index)
