"""What a queue entry tells of its task: all of it while it is fresh; nothing secret, long, old or not understood."""

from datetime import timedelta

import pytest

from scriptdispatch.services.hearsay import FRESH, LONGEST, heard, tell
from tests.contract.store_values import NOW, make_task


def test_a_fresh_task_is_heard_as_it_was_told() -> None:
    task = make_task(params={"a": [1, {"b": None}]}, labels={"site": "sh-1"}, priority="high", dedupe_key="k")
    assert heard(tell(task), NOW) == task


@pytest.mark.parametrize("later", [FRESH, -FRESH])
def test_it_is_believed_for_a_few_seconds_whoever_of_the_two_clocks_is_ahead(later: timedelta) -> None:
    task = make_task()
    assert heard(tell(task), NOW + later) == task
    assert heard(tell(task), NOW + later * 1.01) is None


def test_secrets_and_long_texts_are_not_told() -> None:
    assert tell(make_task(params={"password": "x"}, secret_params=["password"])) is None
    assert tell(make_task(params={"text": "x" * LONGEST})) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"id":"x"}'])
def test_what_is_not_understood_is_not_heard(text: str | None) -> None:
    assert heard(text, NOW) is None
