"""A bounded queue with one thread behind it that hands everything to every sink."""

import logging
import queue
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from steadystep.track.sink import Sink

logger = logging.getLogger("steadystep")

_GATHER_S = 0.5  # why: a thread that wakes for every point costs the training three times what the point costs
_URGENT = ("start", "incident")

_Message = tuple[str, tuple[Any, ...]]
_Queue = queue.SimpleQueue["_Message | None"]  # reentrant: its end may be put in by the garbage collector
_Bell = queue.SimpleQueue[None]


@final
class Mailbox:
    """`put` never waits. A sink that raises is reported once and dropped; a full queue drops, and says so once."""

    def __init__(self, sinks: Sequence[Sink], *, capacity: int, patience_s: float) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._bell: _Bell = queue.SimpleQueue()
        self._capacity = capacity
        self._alive = list(sinks)
        self._thread: threading.Thread | None = None
        self._said = False
        self._patience_s = patience_s
        self._finish: weakref.finalize[Any, Any] | None = None

    def put(self, method: str, *arguments: Any) -> None:
        """Hand something to the sinks, some time soon."""
        if not self._alive:
            return
        if self._thread is None:
            self._begin()
        if self._queue.qsize() < self._capacity:
            self._queue.put((method, arguments))
            if method in _URGENT:
                self._bell.put(None)
        elif not self._said:
            self._said = True
            names = ", ".join(_name(sink) for sink in list(self._alive))
            logger.warning("%s cannot keep up: some points will be missing there; training goes on", names)

    @property
    def waiting(self) -> int:
        """Messages in the queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """Wait until all is handed over, but not for ever."""
        if self._finish is not None:
            self._finish()

    def _begin(self) -> None:
        # why a daemon: a sink that hangs must not keep the program alive
        self._thread = threading.Thread(
            target=_deliver, args=(self._queue, self._bell, self._alive), name="steadystep-sinks", daemon=True
        )
        # Nobody has to call close(): what is left is handed over when the guard is dropped or the program ends.
        self._finish = weakref.finalize(
            self, _finish, self._queue, self._bell, self._thread, self._alive, self._patience_s
        )
        self._thread.start()


def _deliver(messages: _Queue, bell: _Bell, alive: list[Sink]) -> None:
    while (message := messages.get()) is not None:
        method, arguments = message
        _to_each(alive, method, arguments)
        if messages.empty():  # the next ones are handed over together
            with suppress(queue.Empty):
                bell.get(timeout=_GATHER_S)
    _to_each(alive, "close", ())


def _to_each(alive: list[Sink], method: str, arguments: tuple[Any, ...]) -> None:
    for sink in list(alive):
        try:
            getattr(sink, method)(*arguments)
        except BaseException as error:  # whatever it is, it must not end the training
            alive.remove(sink)
            logger.warning("sink %s stopped (%s: %s); training goes on", _name(sink), type(error).__name__, error)
            if method != "close":
                with suppress(BaseException):  # files and connections; whether it works is no news
                    sink.close()


def _finish(messages: _Queue, bell: _Bell, thread: threading.Thread, alive: list[Sink], patience_s: float) -> None:
    messages.put(None)
    bell.put(None)
    if thread is threading.current_thread():  # the collector ran in here: what is left is handed over next
        return
    thread.join(patience_s)
    if thread.is_alive():
        names = ", ".join(_name(sink) for sink in list(alive))
        logger.warning("%s did not finish within %g s and was left behind", names, patience_s)


def _name(sink: Sink) -> str:
    return type(sink).__name__
