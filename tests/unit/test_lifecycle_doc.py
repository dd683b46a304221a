"""docs/lifecycle.md says what the code does: its table of states is the table, its crash points exist."""

import re
from pathlib import Path

from scriptdispatch.domain.lifecycle import TRANSITIONS
from scriptdispatch.domain.model import STATUSES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lifecycle.md").read_text()
STATES = PAGE.partition("\n## ")[0]
CODE = [path.read_text() for path in (ROOT / "scriptdispatch").rglob("*.py")]


def test_the_page_has_the_rows_of_the_table_with_their_sentences_in_order() -> None:
    told = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", STATES, re.MULTILINE)
    assert told == [(before, after, why) for before, row in TRANSITIONS.items() for after, why in row.items()]


def test_states_without_a_way_out_are_said_to_be_final() -> None:
    told = re.findall(r"^\| `(\w+)` \| – \| final", STATES, re.MULTILINE)
    assert told == [status for status, row in TRANSITIONS.items() if not row]


def test_the_picture_shows_only_changes_that_the_table_has() -> None:
    arrows = re.findall(r"^ +(\w+) --> (\w+)", PAGE, re.MULTILINE)
    assert len(arrows) > 10
    assert all(after in TRANSITIONS[before] for before, after in arrows)  # type: ignore[index]
    assert {state for arrow in arrows for state in arrow} | {"paused"} == set(STATUSES)


def test_the_page_names_the_crash_points_of_the_steps_and_none_that_is_not_there() -> None:
    told = set(re.findall(r"`((?:[a-z]+|\*)\.(?:after|before|in|start)\w*)`", PAGE))
    calls = [found for text in CODE for found in re.findall(r'reach(?:_now)?\(\s*f?"([^"]+)"', text)]
    there = {re.sub(r"\{[^}]+\}", "*", place) for place in calls}
    assert told <= there
    assert {place for place in there if re.search(r"_[A-Z]\d$", place)} <= told
