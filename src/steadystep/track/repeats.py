"""The same message step after step is one message and a count."""

import logging
from typing import final

from steadystep.records import Outcome
from steadystep.track.messages import describe

logger = logging.getLogger("steadystep")

_MOST = 100  # steps: whoever watches a run that goes on like this hears of it again


@final
class Repeats:
    """Says the first at once; the others are counted, and said together when something else comes or the run stops."""

    def __init__(self) -> None:
        self._text = ""
        self._level = logging.INFO
        self._first = self._last = -1

    def tell(self, outcome: Outcome, level: int, advice: str) -> None:
        """One step with something to say."""
        text = describe(outcome).partition(": ")[2]
        if text == self._text and not advice and outcome.step == self._last + 1:
            self._last = outcome.step
            if "stop" in outcome.plan.steps or self._last - self._first >= _MOST:
                self._say()
            return
        self.end()
        self._text, self._level, self._first, self._last = text, level, outcome.step, outcome.step
        # why the mark: a screen that shows incidents as cards leaves these out
        logger.log(level, describe(outcome) + advice, extra={"incident": True})

    def end(self) -> None:
        """Something else comes."""
        self._say()
        self._text = ""

    def _say(self) -> None:
        count = self._last - self._first
        if self._text and count == 1:
            logger.log(self._level, f"step {self._last}: {self._text}", extra={"incident": True})
        elif self._text and count > 1:
            steps = f"steps {self._first + 1} to {self._last}"
            logger.log(self._level, f"{steps}: the same {count} times more: {self._text}", extra={"incident": True})
        self._first = self._last
