"""Shared by all tests: determinism, and hypothesis without a clock."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow]
)
# why: the same examples on every machine keep CI repeatable; now and then new ones must be tried (`make test-all`)
settings.register_profile("search", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
# why fewer: one breakage meets many tests, and one that an example notices is mostly noticed by the first few
settings.register_profile(
    "mutants", parent=settings.get_profile("ci"), max_examples=8, phases=(Phase.explicit, Phase.generate)
)  # nor is a smaller example looked for once one was found
settings.load_profile(os.environ.get("STEADYSTEP_HYPOTHESIS", "ci"))


# why: importing every test walks a growing heap for garbage again and again, a third of the time that collecting takes
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage() -> None:
    # why: each test collects garbage afterwards; what the imports made (torch!) need not be walked each time
    gc.collect()
    gc.freeze()


class _Unprefixed(logging.Handler):
    """What was logged without the prefix that every line begins with."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("steadystep: "):
            self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def _every_line_begins_with_steadystep() -> Iterator[None]:
    handler, logger = _Unprefixed(), logging.getLogger("steadystep")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.lines


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and (dynamo.utils.counters or any(dynamo.eval_frame.cached_backends.values())):
        dynamo.reset()  # why: `watch` keeps out of a process that compiles, and the next test may be about `watch`
        dynamo.utils.counters.clear()
    gc.collect()
