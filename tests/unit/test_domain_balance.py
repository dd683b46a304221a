from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scriptdispatch.domain.balance import CHOOSERS, Hand, consistent_hash, device_load, fewest, round_robin


def hand(name: str, load: int = 0, **devices: int) -> Hand:
    return Hand(worker_id=name, load=load, devices=Counter(devices))


hands = st.lists(
    st.builds(
        Hand,
        worker_id=st.uuids().map(str),
        load=st.integers(0, 20),
        devices=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)).map(Counter),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.worker_id,
)
devices = st.one_of(st.none(), st.sampled_from("abcd"))


def test_without_a_device_the_one_with_fewest_tasks_gets_it() -> None:
    assert device_load([hand("w1", 3), hand("w2", 1), hand("w3", 2)], None, 0).worker_id == "w2"


def test_a_worker_that_does_not_handle_the_device_goes_before_an_emptier_one_that_does() -> None:
    assert device_load([hand("w1", 1, a=1), hand("w2", 9)], "a", 0).worker_id == "w2"


def test_of_those_not_handling_the_device_the_one_with_fewest_tasks_gets_it() -> None:
    assert device_load([hand("w1", 0, a=1), hand("w2", 9), hand("w3", 4, b=4)], "a", 0).worker_id == "w3"


def test_if_all_handle_the_device_the_one_with_fewest_of_its_tasks_gets_it() -> None:
    assert device_load([hand("w1", 2, a=2), hand("w2", 9, a=1), hand("w3", 3, a=3)], "a", 0).worker_id == "w2"


def test_fewest_does_not_look_at_devices() -> None:
    assert fewest([hand("w1", 1, a=1), hand("w2", 9)], "a", 0).worker_id == "w1"


def test_round_robin_takes_turns_in_a_stable_order() -> None:
    workers = [hand("w3"), hand("w1"), hand("w2")]
    assert [round_robin(workers, "a", turn).worker_id for turn in range(5)] == ["w1", "w2", "w3", "w1", "w2"]


def test_consistent_hash_without_a_device_takes_the_one_with_fewest_tasks() -> None:
    assert consistent_hash([hand("w1", 3), hand("w2", 1)], None, 0).worker_id == "w2"


def test_consistent_hash_spreads_devices_over_all_workers() -> None:
    workers = [hand(f"w{n}") for n in range(4)]
    share = Counter(consistent_hash(workers, f"dev-{n}", 0).worker_id for n in range(1000))
    assert all(150 < share[worker.worker_id] < 350 for worker in workers)


@given(hands, st.text(min_size=1), st.data())
def test_a_device_keeps_its_worker_when_another_one_leaves(workers: list[Hand], device: str, data: st.DataObject) -> None:
    chosen = consistent_hash(workers, device, 0)
    staying = [one for one in workers if one is chosen or data.draw(st.booleans())]
    assert consistent_hash(staying, device, 1) is chosen


@given(hands, devices)
def test_device_load_is_what_the_contract_says(workers: list[Hand], device: str | None) -> None:
    chosen = device_load(workers, device, 0)
    strangers = [one for one in workers if device is None or not one.devices[device]]
    if strangers:
        assert chosen in strangers
        assert chosen.load == min(one.load for one in strangers)
    else:
        assert device is not None
        assert chosen.devices[device] == min(one.devices[device] for one in workers)


@given(st.sampled_from(sorted(CHOOSERS)), hands, devices, st.integers(0, 10**9))
def test_every_strategy_chooses_one_of_those_offered_and_touches_none(
    name: str, workers: list[Hand], device: str | None, turn: int
) -> None:
    before = [(one.worker_id, one.load, dict(one.devices)) for one in workers]
    assert CHOOSERS[name](workers, device, turn) in workers  # type: ignore[index]
    assert [(one.worker_id, one.load, dict(one.devices)) for one in workers] == before


@given(st.sampled_from(["device_load", "fewest", "consistent_hash"]), hands, devices)
def test_the_choice_does_not_depend_on_the_order_of_the_workers(name: str, workers: list[Hand], device: str | None) -> None:
    choose = CHOOSERS[name]  # type: ignore[index]
    assert choose(workers, device, 0) is choose(list(reversed(workers)), device, 0)
