"""One run as the server keeps it: read on when its file grows, judged now and then, dropped when nobody looks."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import final

from steadystep.curves import open_run
from steadystep.curves.event_files import is_event_file, read_events
from steadystep.dashboard.glance import glance
from steadystep.dashboard.places import Place
from steadystep.dashboard.summary import Spark, Summary, spark_path, summary
from steadystep.errors import SteadystepError
from steadystep.report.verdict import Verdict, judged
from steadystep.report.view import last_finite
from steadystep.track.reading import Follower
from steadystep.track.run import Run

logger = logging.getLogger("steadystep")

_JUDGE_EVERY_S = 5.0  # a verdict costs up to a second for a long run


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """A run as it was at one moment."""

    run: Run
    verdict: Verdict | None
    edition: int
    """Another number whenever something has changed."""


@final
class Shelf:
    """For several threads: `run` for pages, `refresh` for the one that reads in the background."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.looked_at = 0.0
        """When somebody last opened this run."""
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._listed: tuple[int, int] | None = None
        self._follower: Follower | None = None
        self._run: Run | None = None
        self._grew = False
        self._verdict: Verdict | None = None
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

    def run(self) -> Kept:
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
            verdict = judged(run)  # outside the lock: pages need not wait for it
            with self._lock:
                self._verdict, self._edition = verdict, self._edition + 1
            self._judged_at, self._judged_points = time.monotonic(), len(run.loss)
        self.summary = summary(self.place.key, run, self._verdict, stamp[1] / 1e9)

    def _give_up(self, problem: str, stamp: tuple[int, int]) -> None:
        """Until the file changes."""
        key = self.place.key
        with self._lock:
            self._run = self._follower = None
        self.summary = Summary(key=key, name=key, changed=stamp[1] / 1e9, known=True, problem=problem)

    def rest(self) -> None:
        """Let go of what can be read again. A run that has grown under our eyes stays: it will grow again."""
        with self._lock:
            if not self._grew:
                self._run = self._follower = None

    def _read(self) -> Kept:
        with self._lock:
            stamp = self.place.stamp()
            if self._run is None or stamp != self._stamp:
                self._grew = self._grew or self._stamp not in (None, stamp)
                self._edition += self._stamp != stamp
                self._run, self._stamp = self._opened(), stamp
            return Kept(self._run, self._verdict, self._edition)

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

    def _glanced(self) -> Summary:
        changed = self.place.stamp()[1] / 1e9
        if not self.place.ours:
            return Summary(key=self.place.key, name=self.place.key, changed=changed)
        seen = glance(self.place.files[0])
        return Summary(
            key=self.place.key,
            name=self.place.key,
            changed=changed,
            steps=int(seen.steps[-1]) + 1 if len(seen) else 0,
            loss=last_finite(seen),
            spark=Spark(path=spark_path(seen)),
        )
