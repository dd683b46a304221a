"""The parts of the Pulsar stream that need no broker: what is in hand, and how much of the library's log is passed on."""

from typing import Any

from tests.contract.pulsar_library import need_pulsar

need_pulsar()

from scriptdispatch.clock import SystemClock  # noqa: E402
from scriptdispatch.mq.pulsar import HEAVY, PIECE, PulsarStream  # noqa: E402
from scriptdispatch.mq.pulsar_hand import LEASE_S, Hand  # noqa: E402
from scriptdispatch.mq.pulsar_log import BURST, WINDOW_S, Pace, _cut  # noqa: E402


class Message:
    """As the library gives it. Two of them with one number are two copies of one message."""

    def __init__(self, number: int, body: bytes = b"") -> None:
        self._number, self._body = number, body

    def message_id(self) -> Any:
        return f"(7,3,-1,{self._number})"

    def data(self) -> bytes:
        return self._body or str(self._number).encode()

    def partition_key(self) -> str:
        return ""


def test_a_copy_of_what_is_in_hand_is_not_handed_out_but_acknowledged_in_its_place() -> None:
    hand = Hand()
    old, new, other = Message(0), Message(0), Message(1)
    (first,) = hand.take([old], 0)
    assert [delivery.body for delivery in hand.take([new, other], 1)] == [b"1"]
    assert hand.give_up([first]) == [new]
    assert len(hand) == 1


def test_after_it_was_given_up_a_copy_is_handed_out_again() -> None:
    hand = Hand()
    (first,) = hand.take([Message(0)], 0)
    hand.give_up([first])
    assert hand.give_up([first]) == [], "given up twice is given up once"
    (again,) = hand.take([Message(0)], 1)
    assert again == first


def test_the_id_is_a_plain_word() -> None:
    (delivery,) = Hand().take([Message(5)], 0)
    assert delivery.id == "7:3:-1:5"


def test_what_is_not_given_up_in_time_is_handed_out_again_oldest_first_and_then_leased_anew() -> None:
    hand = Hand()
    old = hand.take([Message(n) for n in range(5)], 0)
    young = hand.take([Message(9)], 10)
    assert hand.overdue(10, LEASE_S - 1) == []
    assert hand.overdue(3, LEASE_S) == old[:3]
    assert hand.overdue(10, LEASE_S) == old[3:]
    assert hand.overdue(10, LEASE_S) == []
    assert hand.overdue(10, LEASE_S + 10) == young
    assert hand.overdue(10, 2 * LEASE_S) == old


def test_nothing_is_in_hand_when_its_connection_has_ended() -> None:
    hand = Hand()
    held = hand.take([Message(0)], 0)
    hand.drop()
    assert hand.holding(held) == []
    assert hand.give_up(held) == []
    assert hand.overdue(10, LEASE_S) == []


def test_the_library_is_heard_in_bursts_and_what_was_held_back_is_counted() -> None:
    pace = Pace()
    said = [pace.admit(n * 0.01) for n in range(100)]
    assert said == [0] * BURST + [None] * (100 - BURST)
    assert pace.admit(WINDOW_S + 1) == 100 - BURST
    assert pace.admit(WINDOW_S + 2) == 0


def test_the_librarys_lines_lose_what_ours_have_already() -> None:
    line = "2026-01-01 12:00:00.000 ERROR [14] ClientConnection:485 | [<none> -> x] Failed to connect\n"
    assert _cut(line) == "[<none> -> x] Failed to connect"
    assert _cut("something else\n") == "something else"


async def test_a_batch_ends_where_it_is_heavy_enough_and_the_rest_is_the_next() -> None:
    stream = PulsarStream("pulsar://localhost:1", "t", SystemClock())
    stream._spare.extend(Message(n, b"x" * 1_000_000) for n in range(50))
    first = stream._take(2_000)
    assert HEAVY <= sum(len(delivery.body) for delivery in first) < HEAVY + PIECE * 1_000_000
    rest = stream._take(2_000) + stream._take(2_000)
    assert [delivery.id for delivery in first + rest] == [f"7:3:-1:{n}" for n in range(50)]
    stream._spare.extend(Message(n) for n in range(50, 90))
    assert [len(stream._take(30)) for _ in range(3)] == [30, 10, 0]
