"""All runs in a folder. One thread walks and reads, the newest run first; pages take what is there."""

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from steadystep._utils.text import logger
from steadystep.errors import SteadystepError
from steadystep.pages.incident_groups import Headline, headline
from steadystep.pages.run_list import RunFolder, RunSummary, Spark, glance, places, spark_heights, summary
from steadystep.runs.json_and_events import is_event_file, read_events
from steadystep.runs.open import open_run
from steadystep.runs.run import Run
from steadystep.runs.run_log import Follower

_JUDGE_EVERY_S = 5.0  # a verdict costs up to a second for a long run


@final
@dataclass(frozen=True, slots=True)
class CachedRun:
    """A run as it was at one moment."""

    run: Run
    verdict: Headline | None
    edition: int
    """Another number whenever something has changed."""


@final
class RunCache:
    """For several threads: `run` for pages, `refresh` for the one that reads in the background."""

    def __init__(self, place: RunFolder) -> None:
        self.place = place
        self.looked_at = 0.0
        """When somebody last opened this run."""
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._listed: tuple[int, int] | None = None
        self._follower: Follower | None = None
        self._run: Run | None = None
        self._grew = False
        self._verdict: Headline | None = None
        self._judged_at, self._judged_points = 0.0, -1
        self._edition = 0
        self.summary = self._glanced()

    @property
    def waits(self) -> bool:
        """The list does not know all of it yet."""
        return self._listed != self.place.stamp() or (self._run is not None and self._is_due(self._run))

    @property
    def held(self) -> bool:
        """Its curves are in memory."""
        return self._run is not None

    def run(self) -> CachedRun:
        """The run as of now, with the last verdict; SteadystepError says why it cannot be read."""
        self.looked_at = time.monotonic()
        return self._read()

    def refresh(self) -> None:
        """Read what is new, judge it now and then, and write the row of the list. Nothing is raised."""
        stamp = self.place.stamp()
        try:
            self._refresh(stamp)
        except SteadystepError as error:
            self._give_up(str(error), stamp)
        except Exception as error:  # why: whatever is in one log, the others want to be read
            logger.warning("%s cannot be shown (%s: %s)", self.place.path, type(error).__name__, error)
            self._give_up(f"cannot be shown ({type(error).__name__}: {error})", stamp)
        self._listed = stamp

    def _refresh(self, stamp: tuple[int, int]) -> None:
        run = self._read().run
        if self._is_due(run):
            verdict = headline(run)  # outside the lock: pages need not wait for it
            with self._lock:
                self._verdict, self._edition = verdict, self._edition + 1
            self._judged_at, self._judged_points = time.monotonic(), len(run.loss)
        self.summary = summary(self.place.key, run, self._verdict, stamp[1] / 1e9)

    def _give_up(self, problem: str, stamp: tuple[int, int]) -> None:
        """Until the file changes."""
        key = self.place.key
        with self._lock:
            self._run = self._follower = None
        self.summary = RunSummary(key=key, name=key, changed=stamp[1] / 1e9, known=True, problem=problem)

    def rest(self) -> None:
        """Let go of what can be read again. A run that has grown under our eyes stays: it will grow again."""
        with self._lock:
            if not self._grew:
                self._run = self._follower = None

    def _read(self) -> CachedRun:
        with self._lock:
            stamp = self.place.stamp()
            if self._run is None or stamp != self._stamp:
                self._grew = self._grew or self._stamp not in (None, stamp)
                self._edition += self._stamp != stamp
                self._run, self._stamp = self._opened(), stamp
            return CachedRun(self._run, self._verdict, self._edition)

    def _opened(self) -> Run:
        """From the files that were found, and no others: a second search could leave the folder by a link."""
        files = self.place.files
        if not self.place.ours:
            if is_event_file(files[0]):
                return read_events(list(files), folder=self.place.path, columns={})
            return open_run(files[0])
        self._follower = self._follower or Follower(files[0])
        self._follower.update()
        return self._follower.run

    def _is_due(self, run: Run) -> bool:
        if self._verdict is None:
            return True
        return len(run.loss) != self._judged_points and time.monotonic() - self._judged_at > _JUDGE_EVERY_S

    def _glanced(self) -> RunSummary:
        changed = self.place.stamp()[1] / 1e9
        if not self.place.ours:
            return RunSummary(key=self.place.key, name=self.place.key, changed=changed)
        seen = glance(self.place.files[0])
        return RunSummary(
            key=self.place.key,
            name=self.place.key,
            changed=changed,
            steps=int(seen.steps[-1]) + 1 if len(seen) else 0,
            loss=float(seen.values[-1]) if len(seen) else None,
            spark=Spark(heights=spark_heights(seen)),
        )


_PAUSE_S = 0.5
_WALK_EVERY_S = 2.0
_WALK_SHARE = 0.1  # of the time may go into walking
_MOST_HELD = 12  # runs with their curves in memory, beside those that grow


@final
class Library:
    """The runs in a folder, read in the background. Use it as a context manager.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._caches: dict[str, RunCache] = {}
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

    def find(self, key: str) -> RunCache | None:
        """Return the run with the name `key`; the name is looked up, never used as a path."""
        self._walk(at_most_every_s=_WALK_EVERY_S)
        return self._caches.get(key)

    def summaries(self) -> tuple[RunSummary, ...]:
        """Return summaries of all runs, the last changed first."""
        self._walk(at_most_every_s=_WALK_EVERY_S)
        return tuple(sorted((s.summary for s in self._caches.values()), key=lambda s: (-s.changed, s.key)))

    def read_all(self) -> None:
        """Read whatever is new, now."""
        for cache in self._waiting():
            cache.refresh()
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
            logger.warning("the dashboard's reader continues after %s", said)

    def _waiting(self) -> list[RunCache]:
        caches = [cache for cache in self._caches.values() if cache.waits]
        return sorted(caches, key=lambda cache: (-cache.looked_at, -cache.place.stamp()[1]))

    def _tidy(self) -> None:
        held = sorted((s for s in self._caches.values() if s.held), key=lambda cache: -cache.looked_at)
        for cache in held[_MOST_HELD:]:
            cache.rest()

    def _walk(self, *, at_most_every_s: float) -> None:
        with self._walking:
            now = time.monotonic()
            if now - self._walked < max(at_most_every_s, self._walk_took / _WALK_SHARE):
                return
            found = {place.key: place for place in places(self.root)}
            kept = {k: s for k, s in self._caches.items() if k in found and s.place == found[k]}
            self._caches = {key: kept.get(key) or RunCache(place) for key, place in found.items()}
            self._walked = time.monotonic()
            self._walk_took = self._walked - now
