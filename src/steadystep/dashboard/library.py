"""All runs in a folder. One thread walks and reads, the newest run first; pages take what is there."""

import logging
import math
import threading
import time
from pathlib import Path
from typing import Self, final

from steadystep.dashboard.places import places
from steadystep.dashboard.shelf import Shelf
from steadystep.dashboard.summary import Summary

logger = logging.getLogger("steadystep")

_PAUSE_S = 0.5
_WALK_EVERY_S = 2.0
_WALK_SHARE = 0.1  # of the time may go into walking
_MOST_HELD = 12  # runs with their curves in memory, beside those that grow


@final
class Library:
    """Use it as a context: reading goes on until it is left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._shelves: dict[str, Shelf] = {}
        self._walked, self._walk_took = -math.inf, 0.0
        self._complained: set[str] = set()
        self._walking = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="steadystep-reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def find(self, key: str) -> Shelf | None:
        """The run of that name, which is looked up and never made into a path."""
        self._walk(at_most_every_s=_WALK_EVERY_S)
        return self._shelves.get(key)

    def summaries(self) -> tuple[Summary, ...]:
        """All runs, the last changed first."""
        self._walk(at_most_every_s=_WALK_EVERY_S)
        return tuple(sorted((s.summary for s in self._shelves.values()), key=lambda s: (-s.changed, s.key)))

    def read_all(self) -> None:
        """Read whatever is new, now."""
        for shelf in self._waiting():
            shelf.refresh()
            self._tidy()
            if self._over.is_set():
                return

    def _work(self) -> None:
        while not self._over.wait(_PAUSE_S):
            try:
                self._walk(at_most_every_s=_WALK_EVERY_S)
                self.read_all()
            except Exception as error:  # why: no log may take the reader down for all the others
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        if said not in self._complained:
            self._complained.add(said)
            logger.warning("the dashboard's reader goes on after %s", said)

    def _waiting(self) -> list[Shelf]:
        shelves = [shelf for shelf in self._shelves.values() if shelf.waits]
        return sorted(shelves, key=lambda shelf: (-shelf.looked_at, -shelf.place.stamp()[1]))

    def _tidy(self) -> None:
        held = sorted((s for s in self._shelves.values() if s.held), key=lambda shelf: -shelf.looked_at)
        for shelf in held[_MOST_HELD:]:
            shelf.rest()

    def _walk(self, *, at_most_every_s: float) -> None:
        with self._walking:
            now = time.monotonic()
            if now - self._walked < max(at_most_every_s, self._walk_took / _WALK_SHARE):
                return
            found = {place.key: place for place in places(self.root)}
            kept = {k: s for k, s in self._shelves.items() if k in found and s.place == found[k]}
            self._shelves = {key: kept.get(key) or Shelf(place) for key, place in found.items()}
            self._walked = time.monotonic()
            self._walk_took = self._walked - now
