"""A healthy step stays short: few files to read, few calls to pay for."""

import pytest
from tools.step_calls import (
    OPTIMIZERS,
    STAGES,
    Call,
    Loop,
    calls_of,
    files_by_stage,
    first_entered,
    median_step,
    operators_of,
    recorded,
)

from steadystep.engine.pipeline import Pipeline


def test_a_healthy_step_calls_at_most_35_files_200_times() -> None:
    step = median_step(recorded(counted=21))
    assert len({call.file for call in step}) <= 35
    assert len(step) <= 200


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_median_step_launches_no_more_than_the_plain_loop(optimizer: str) -> None:
    plain = operators_of(Loop(optimizer).plain(), warm_up=3, counted_steps=5).median
    assert operators_of(Loop(optimizer).guarded(), warm_up=64, counted_steps=21).median <= plain


@pytest.mark.parametrize(("optimizer", "look"), [("AdamW", 179), ("SGD", 159)])
def test_a_stretch_launches_no_more_than_the_plain_loop(optimizer: str, look: int) -> None:
    """128 steps: one look at batches, outputs and the update, seven at weights and optimizer state, six snapshots."""
    plain = operators_of(Loop(optimizer).plain(), warm_up=3, counted_steps=5).median
    counted = operators_of(Loop(optimizer).guarded(corruption_checks="off"), counted_steps=128)
    assert counted.launched.total() <= 128 * plain
    assert max(counted.of_steps) - counted.median <= look


def test_the_stages_are_methods_of_the_pipeline_and_come_in_order() -> None:
    assert all(callable(getattr(Pipeline, stage)) for stage in STAGES)
    stages = [call.stage for call in calls_of(Loop("SGD").guarded())]
    assert list(dict.fromkeys(stages)) == list(STAGES)
    assert stages == sorted(stages, key=STAGES.index)


def test_a_file_belongs_to_the_stage_that_calls_it_first() -> None:
    step = [Call("collect", "a.py", "f"), Call("measure", "b.py", "g"), Call("measure", "a.py", "f")]
    none = {"judge": [], "apply": [], "record": []}
    assert files_by_stage(step) == {"collect": ["a.py"], "measure": ["b.py", "a.py"]} | none
    assert first_entered(step) == {"collect": ["a.py"], "measure": ["b.py"]} | none
    assert median_step([step[:1], step[:2], step]) == step[:2]
