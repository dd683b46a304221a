"""The scripts used last, kept in the process: a fleet runs the same few, and a script never changes. Worker and web."""

from collections import OrderedDict
from typing import Final

from scriptdispatch.domain.model import Script
from scriptdispatch.store.port import Store

MOST: Final = 1_000
MOST_CHARACTERS: Final = 16_000_000


class Scripts:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, Script] = OrderedDict()
        self._characters = 0

    async def get(self, id: str) -> Script | None:
        if id in self._kept:
            self._kept.move_to_end(id)
            return self._kept[id]
        [script] = await self._store.scripts([id])
        if script is not None:
            self.keep(script)
        return script

    def keep(self, script: Script) -> None:
        """One that is in the store. Those that were not used for longest make room."""
        if script.id in self._kept:
            return
        self._kept[script.id] = script
        self._characters += len(script.content)
        while len(self._kept) > MOST or self._characters > MOST_CHARACTERS:
            _, gone = self._kept.popitem(last=False)
            self._characters -= len(gone.content)
