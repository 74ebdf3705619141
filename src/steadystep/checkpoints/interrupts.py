"""Ctrl-C and SIGTERM: the step is finished, the state saved, and then the program ends as it would have."""

import os
import signal
import threading
from types import FrameType
from typing import Any, final

from steadystep._utils.text import logger

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Interrupts:
    """Remembers the first signal; the second one acts at once. Only the main thread can hear signals."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal that came."""
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Listen, except for what is ignored on purpose, such as Ctrl-C by a job in the background of a shell."""
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._heard) for number in heard}

    def remove(self) -> None:
        """Leave it to whoever listened before. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            listener = signal.getsignal(number)
            if listener == self._heard and handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)
            # why: another guard that listens since must not hand over to this one any more
            while isinstance(other := getattr(listener, "__self__", None), Interrupts):
                listener = other._before.get(number)
                if listener == self._heard:
                    other._before[number] = handler

    def obey(self) -> None:
        """The state is safe: do what the signal asked for."""
        # why: another rank may have heard it, and this one stops together with that one
        number, self.asked = self.asked or signal.SIGTERM, None
        handler = self._before.get(number)
        self.remove()
        if number == signal.SIGTERM and handler == signal.SIG_DFL:
            raise SystemExit(128 + number)  # why: the default action would not run `finally` or close files
        signal.raise_signal(number)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self.obey()
            return
        self.asked = number
        if os.getpid() == self._process:  # a loader's forked worker has nothing to save: it only must not die first
            name = signal.Signals(number).name
            logger.warning("%s: finishing this step and saving; send it again to stop immediately", name)
