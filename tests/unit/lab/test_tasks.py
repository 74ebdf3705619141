"""The tasks beside the judged ones: each as good or as bad as it claims to be."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep.errors import ConfigError
from steadystep.init import initialise_
from steadystep.lab import tasks
from steadystep.lab.tasks import JUDGED, TASKS, moons
from steadystep.lab.tasks.task import Shuffled
from steadystep.train import RunPlan, train
from tests.unit.lab.test_lab import train as trained

NEW = [name for name in TASKS if name not in JUDGED]


def test_bad_weights_are_bad_and_a_recipe_cures_them() -> None:
    task = TASKS["gpt-bad-init"].make(0)
    good = TASKS["gpt"].make(0).held_out()
    assert good == pytest.approx(math.log(256), rel=0.01)
    assert task.held_out() > 1.5 * good
    initialise_(task.model, "gpt2", seed=0)
    assert task.held_out() == pytest.approx(good, rel=0.01)


def test_post_ln_has_the_norm_after_the_addition() -> None:
    model = TASKS["gpt-post-ln"].make(0).model
    assert all(block.post for block in model.blocks)


def test_the_elman_network_has_no_gates() -> None:
    elman, lstm = TASKS["elman"].make(0).model.cells, TASKS["rnn"].make(0).model.cells
    assert isinstance(elman, nn.RNN)
    assert lstm.weight_hh_l0.numel() == 4 * elman.weight_hh_l0.numel()


def test_a_deep_network_passes_its_signal_through() -> None:
    task = TASKS["deep-mlp"].make(0)
    linear = [layer for layer in task.model if isinstance(layer, nn.Linear)]
    assert len(linear) == 17
    task.loss(task.batch()).backward()  # type: ignore[no-untyped-call]
    first, last = (float(layer.weight.grad.norm()) for layer in (linear[0], linear[-2]))
    assert 0.1 < first / last < 10


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "moons"])
def test_small_classifiers_get_most_of_it_right(name: str) -> None:
    task = TASKS[name].make(0)
    trained(task, 150)
    xs, ys = task.batch()
    with torch.no_grad():
        right = (task.model(xs).argmax(-1) == ys).float().mean().item()
    assert right > 0.8
    assert task.held_out() < 0.4


def test_digits_held_out_are_not_among_the_training_ones() -> None:
    (train_images, _), (tests, answers) = tasks._split()
    assert (len(train_images), len(tests)) == (1437, 360)
    assert train_images.min() == 0
    assert train_images.max() == 1
    seen = {tuple(row) for row in train_images.tolist()}
    assert not any(tuple(row) in seen for row in tests.tolist())
    assert answers.bincount().min() > 20  # all ten digits


def test_without_scikit_learn_there_is_an_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    tasks._digits.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", missing)
        with pytest.raises(ConfigError, match=r"pip install 'steadystep\[lab\]'"):
            TASKS["digits-cnn"].make(0)


@pytest.mark.parametrize("count", [2, 7, 100])
def test_moons_without_noise_are_those_of_scikit_learn(count: int) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    xs, ys = moons(count, noise=0.0, rng=torch.Generator())
    theirs, classes = datasets.make_moons(count, shuffle=False, noise=None)
    mine = sorted(map(tuple, torch.cat([xs, ys[:, None]], 1).tolist()))
    other = sorted((a, b, float(c)) for (a, b), c in zip(theirs.tolist(), classes.tolist(), strict=True))
    if count % 2 == 0:  # with an odd number the spare point is on the other moon
        assert torch.allclose(torch.tensor(mine), torch.tensor(other), atol=1e-5)
    on_first = xs[ys == 0].square().sum(1)
    on_second = (xs[ys == 1] - torch.tensor([1.0, 0.5])).square().sum(1)
    assert torch.allclose(torch.cat([on_first, on_second]), torch.ones(count), atol=1e-5)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_gives_every_sample_once(count: int, batch_size: int, seed: int) -> None:
    data = Shuffled(torch.arange(count), torch.arange(count) * 2, batch_size=batch_size, seed=seed)
    for _ in range(2):
        batches = [data.batch() for _ in range(math.ceil(count / batch_size))]
        assert sorted(torch.cat([xs for xs, _ in batches]).tolist()) == list(range(count))
        assert all(torch.equal(ys, xs * 2) for xs, ys in batches)


def test_train_takes_each_by_name(tmp_path: Path) -> None:
    for name in NEW:
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"task: {name}\ntraining:\n  total_steps: 2\nmonitoring:\n  save_checkpoints: false\n")
        summary = train(RunPlan.load(file), tmp_path / name, watch=lambda outcome, guard: None)
        assert summary.updates == 2
        assert math.isfinite(summary.validation or math.nan)
