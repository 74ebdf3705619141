"""Shared by all tests: determinism, and hypothesis without a clock."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
# why: each test collects garbage afterwards; what the imports made (torch!) need not be walked each time
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    gc.collect()
