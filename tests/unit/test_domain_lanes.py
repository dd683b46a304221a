from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain.lanes import lane_key, lane_of, priority_of
from scriptdispatch.domain.model import PRIORITIES, Priority
from scriptdispatch.ids import new_id
from tests.unit.domain_values import NOW

RANK = {"high": 0, "normal": 1, "low": 2}
# To the millisecond, as every time in the product.
times = st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)).map(
    lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)
)
places = st.tuples(st.sampled_from(PRIORITIES), times, st.uuids().map(str))


@given(places, places)
def test_the_order_is_priority_then_due_time_then_age(
    one: tuple[Priority, datetime, str], other: tuple[Priority, datetime, str]
) -> None:
    def key(place: tuple[Priority, datetime, str]) -> str:
        return lane_key(place[2], place[0], place[1])

    def order(place: tuple[Priority, datetime, str]) -> tuple[int, datetime, str]:
        return (RANK[place[0]], place[1], place[2])

    assert (key(one) < key(other)) == (order(one) < order(other))


def test_of_two_equal_ones_the_older_goes_first() -> None:
    first, second = new_id(), new_id()
    assert lane_key(first, "normal", NOW) < lane_key(second, "normal", NOW)


def test_fifo_looks_at_time_only() -> None:
    early = lane_key("b", "low", NOW, "fifo")
    assert early < lane_key("a", "high", NOW + timedelta(milliseconds=1), "fifo")


@given(st.sampled_from(PRIORITIES), times)
def test_the_key_tells_its_priority(priority: Priority, due_at: datetime) -> None:
    assert priority_of(lane_key("t", priority, due_at)) == priority


def test_a_task_without_a_device_is_a_lane_of_its_own() -> None:
    assert lane_of("t1", "dev-001") == lane_of("t2", "dev-001") == "dev-001"
    assert lane_of("t1", None) != lane_of("t2", None)
    assert lane_of("t1", None).startswith("~")
