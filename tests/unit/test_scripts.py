"""Scripts that are kept in a process: read once, and never more of them than there is room for."""

import pytest

from scriptdispatch.services import scripts as room
from scriptdispatch.services.scripts import Scripts
from scriptdispatch.store.memory import MemoryStore
from tests.contract.store_values import HeldClock, insert_task, make_script


class Counted(MemoryStore):
    asked = 0

    async def scripts(self, ids):  # type: ignore[no-untyped-def]
        self.asked += 1
        return await super().scripts(ids)


async def test_a_script_is_read_once_and_one_that_is_not_there_is_asked_for_again() -> None:
    store = Counted(HeldClock())
    script = make_script()
    scripts = Scripts(store)
    assert await scripts.get(script.id) is None
    await insert_task(store, script=script, script_id=script.id)
    assert [await scripts.get(script.id) for _ in range(3)] == [script] * 3
    assert store.asked == 2


@pytest.mark.parametrize(("limit", "most"), [("MOST", 3), ("MOST_CHARACTERS", 30)])
async def test_the_one_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(room, limit, most)
    store = Counted(HeldClock())
    made = [make_script(f"echo {n:5}") for n in range(4)]  # 10 characters each
    for script in made:
        await insert_task(store, script=script, script_id=script.id)
    scripts = Scripts(store)
    for script in made[:3]:
        scripts.keep(script)
    await scripts.get(made[0].id)
    scripts.keep(made[3])
    assert store.asked == 0
    await scripts.get(made[0].id)
    assert store.asked == 0
    await scripts.get(made[1].id)
    assert store.asked == 1
