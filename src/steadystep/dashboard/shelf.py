"""One run as the server keeps it: read on when its file grows, judged now and then, dropped when nobody looks."""

import threading
import time
from dataclasses import dataclass
from typing import final

from steadystep.curves import open_run
from steadystep.dashboard.glance import glance
from steadystep.dashboard.places import Place
from steadystep.dashboard.summary import Spark, Summary, spark_path, summary
from steadystep.errors import SteadystepError
from steadystep.report.verdict import Verdict, judged
from steadystep.report.view import last_finite
from steadystep.track.reading import Follower
from steadystep.track.run import Run

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
        key, stamp = self.place.key, self.place.stamp()
        try:
            run = self._read().run
        except SteadystepError as error:
            self.summary = Summary(key=key, name=key, changed=stamp[1] / 1e9, known=True, problem=str(error))
        else:
            if self._is_due(run):
                verdict = judged(run)  # outside the lock: pages need not wait for it
                with self._lock:
                    self._verdict, self._edition = verdict, self._edition + 1
                self._judged_at, self._judged_points = time.monotonic(), len(run.loss)
            self.summary = summary(key, run, self._verdict, stamp[1] / 1e9)
        self._listed = stamp

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
        if not self.place.ours:
            return open_run(self.place.path)
        self._follower = self._follower or Follower(self.place.path)
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
