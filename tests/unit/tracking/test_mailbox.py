"""The queue between training and sinks: its end comes from wherever the garbage collector happens to run."""

import gc
import threading
from typing import Any

import pytest

from steadystep.tracking.broadcast import Mailbox


class LastUser:
    """Drops the mailbox from inside the mailbox's own thread."""

    def __init__(self) -> None:
        self.held: list[Mailbox] = []
        self.dropped_in: list[threading.Thread] = []
        self.closed = threading.Event()
        self.seen: list[Any] = []

    def step(self, row: Any) -> None:
        self.seen.append(row)
        self.held.clear()
        gc.collect()
        self.dropped_in.append(threading.current_thread())

    def close(self) -> None:
        self.closed.set()


def test_a_mailbox_that_is_dropped_in_its_own_thread_still_hands_over_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, gate = LastUser(), threading.Event()
    sink.start = gate.wait  # type: ignore[attr-defined]
    mailbox = Mailbox([sink], capacity=100, patience_s=20.0)  # type: ignore[list-item]
    mailbox.put("start", 20)
    for i in range(3):
        mailbox.put("step", i)
    sink.held.append(mailbox)
    del mailbox
    gate.set()
    assert sink.closed.wait(20)
    assert sink.seen == [0, 1, 2]
    assert sink.dropped_in[0].name == "steadystep-sinks"
    assert not caplog.records
