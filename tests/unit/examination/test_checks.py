"""Each check names its mistake in an observation made by hand, and is silent about an unremarkable one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from steadystep._utils import Attempts
from steadystep.examination.checks import faults_of, partly_reached
from steadystep.examination.observation import Observation, trivial_loss
from tests.unit.examination.jobs import classes, numbers, tokens, yes_or_no
from tests.unit.examination.made import PARAMETERS, made_observation, made_pass, uniform


def named(o: Observation) -> list[str]:
    return [f"{found.cause}:{found.fault}" for found in faults_of(o, Attempts())]


def with_parameters(**changes: Any) -> Observation:
    return made_observation(parameters=replace(PARAMETERS, **changes))


def with_rates(*rates: float) -> Observation:
    return made_observation(rates=list(rates))


def regression(change: Callable[[Tensor], Tensor] = lambda y: y, **changes: Any) -> Observation:
    """The identity for a model: the first feature is the output."""
    return made_observation([(x[:, :1], change(y)) for x, y in numbers()], F.mse_loss, **changes)


def test_nothing_is_named_where_nothing_is_wrong() -> None:
    assert named(made_observation()) == []
    assert named(regression()) == []


HEALTHY: dict[str, Callable[[], Observation]] = {
    "log-probabilities to nll_loss": lambda: made_observation(loss=lambda x, y: F.nll_loss(x.log_softmax(1), y)),
    "a sigmoid to binary_cross_entropy": lambda: made_observation(
        [(x[:, 0], y) for x, y in yes_or_no()], lambda x, y: F.binary_cross_entropy(x.sigmoid(), y)
    ),
    "targets within reach of a tanh": lambda: made_observation(
        [(x[:, :1], y) for x, y in numbers()], lambda x, y: F.mse_loss(x.tanh(), y)
    ),
    "a warmup from 0": lambda: with_rates(*[step / 100 for step in range(200)]),
    "a cosine": lambda: with_rates(*[1.0 + math.cos(step / 64) for step in range(200)]),
    "a rate of 0 with a schedule that is not known": lambda: with_parameters(rate_zero=tuple("abcd"), scheduled=True),
    "two classes that look like probabilities": lambda: made_observation(
        [(torch.stack([p := uniform(32, seed=seed), 1 - p], 1), (p > 0.5).long()) for seed in range(3)]
    ),
    "the same batch, as the whole dataset": lambda: made_observation([classes(number=1, size=150, inputs=4)[0]] * 5),
    "a minus before kl_div": lambda: made_observation(
        [(x.log_softmax(1), x.softmax(1)) for x, _ in classes(number=3)],
        lambda x, y: -F.kl_div(x, y, reduction="batchmean"),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_right_is_not_named(name: str) -> None:
    assert named(HEALTHY[name]()) == []


FAULTS: dict[str, tuple[Callable[[], Observation], str]] = {
    "a loss that is NaN": (
        lambda: made_observation(
            passes=[
                made_pass(*batch, loss=lambda x, y: F.cross_entropy(x, y) * math.nan) for batch in classes(inputs=4)
            ]
        ),
        "non-finite-loss:",
    ),
    "NaN in a batch": (
        lambda: made_observation([(x * math.nan, y) for x, y in classes(inputs=4)]),
        "non-finite-input:",
    ),
    "a gradient that is infinite": (
        lambda: with_parameters(norms={**PARAMETERS.norms, "b": math.inf}),
        "non-finite-gradient:",
    ),
    "an optimizer of another model": (lambda: with_parameters(strangers=4), "no-learning:wrong-optimizer-params"),
    "weights outside of the model": (lambda: with_parameters(outside_model=2), "no-learning:frozen-parameters"),
    "float16 weights": (
        lambda: with_parameters(half_precision=("a", "b"), rounds_eps=True),
        "gradient-underflow:precision",
    ),
    "everything frozen": (
        lambda: with_parameters(trainable=0, norms={}, sizes={}),
        "zero-gradient:frozen-parameters",
    ),
    "no gradient anywhere": (
        lambda: made_observation(
            parameters=replace(PARAMETERS, norms=dict.fromkeys("abcd", 0.0)), reached_fresh=frozenset()
        ),
        "zero-gradient:",
    ),
    "zeros behind zeros": (
        lambda: made_observation(
            parameters=replace(PARAMETERS, norms=dict.fromkeys("abcd", 0.0), sizes=dict.fromkeys("abcd", 0.0)),
            reached_fresh=frozenset(),
        ),
        "poor-initialisation:",
    ),
    "a rate of 0": (lambda: with_parameters(rate_zero=tuple("abcd")), "learning-rate-too-low:"),
    "a group of rate 0": (lambda: with_parameters(rate_zero=("a", "b")), "zero-gradient:frozen-parameters"),
    "a schedule of zeros": (lambda: with_rates(*[0.0] * 200), "schedule-error:"),
    "a schedule that ends at once": (lambda: with_rates(*[0.5**step for step in range(200)]), "schedule-error:"),
    "one class at a time": (
        lambda: made_observation([(x, torch.full_like(y, i % 3)) for i, (x, y) in enumerate(classes(inputs=4))]),
        "no-learning:unshuffled-data",
    ),
    "constant targets": (
        lambda: made_observation([(x, torch.ones_like(y)) for x, y in classes(inputs=4)]),
        "no-learning:constant-targets",
    ),
    "constant numbers": (lambda: regression(lambda y: torch.full_like(y, 3.0)), "no-learning:constant-targets"),
    "ignored targets": (
        lambda: made_observation(
            [(x, torch.full_like(y, -100)) for x, y in classes(inputs=4)],
            lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        ),
        "zero-gradient:all-ignored-targets",
    ),
    "another ignored label": (
        lambda: made_observation(
            [(x, torch.full_like(y, 3)) for x, y in classes(inputs=4)],
            lambda x, y: F.cross_entropy(x, y, ignore_index=3, reduction="sum"),
        ),
        "zero-gradient:all-ignored-targets",
    ),
    "constant inputs": (
        lambda: made_observation([(torch.ones_like(x), y) for x, y in classes(inputs=4)]),
        "no-learning:constant-inputs",
    ),
    "the same batch of 32": (lambda: made_observation([classes(number=1, inputs=4)[0]] * 5), "repeated-batch:"),
    "softmax, then cross_entropy": (
        lambda: made_observation(loss=lambda x, y: F.cross_entropy(x.softmax(1), y)),
        "no-learning:wrong-loss",
    ),
    "probabilities to cross_entropy": (
        lambda: made_observation([(x.softmax(1), y) for x, y in classes(inputs=4)]),
        "no-learning:wrong-loss",
    ),
    "sigmoid, then with_logits": (
        lambda: made_observation(
            [(x[:, 0], y) for x, y in yes_or_no()],
            lambda x, y: F.binary_cross_entropy_with_logits(x.sigmoid(), y),
        ),
        "no-learning:wrong-loss",
    ),
    "relu, then sigmoid": (
        lambda: made_observation(
            [(x[:, 0], y) for x, y in yes_or_no()], lambda x, y: F.binary_cross_entropy(x.relu().sigmoid(), y)
        ),
        "no-learning:wrong-loss",
    ),
    "logits to nll_loss": (lambda: made_observation(loss=F.nll_loss), "no-learning:wrong-loss"),
    "probabilities to nll_loss": (
        lambda: made_observation(loss=lambda x, y: F.nll_loss(x.softmax(1), y)),
        "no-learning:wrong-loss",
    ),
    "minus cross_entropy": (
        lambda: made_observation(loss=lambda x, y: -F.cross_entropy(x, y)),
        "no-learning:wrong-loss",
    ),
    "softmax over samples": (
        lambda: made_observation(loss=lambda x, y: F.nll_loss(x.log_softmax(0), y)),
        "no-learning:softmax-axis",
    ),
    "softmax of one unit": (
        lambda: made_observation(
            [(x[:, :1], y[:, None]) for x, y in yes_or_no()],
            lambda x, y: F.binary_cross_entropy(x.softmax(1), y),
        ),
        "no-learning:softmax-axis",
    ),
    "(N, 1) against (N,), by hand": (
        lambda: made_observation([(x[:, :1], y[:, 0]) for x, y in numbers()], lambda x, y: (x - y).square().mean()),
        "no-learning:wrong-loss",
    ),
    "targets a sigmoid cannot reach": (
        lambda: made_observation([(x[:, :1], 9 * y) for x, y in numbers()], lambda x, y: F.mse_loss(x.sigmoid(), y)),
        "no-learning:wrong-loss",
    ),
    "another sample's target": (lambda: made_observation(own_target=0.05), "no-learning:labels-shuffled"),
    "neighbors": (lambda: made_observation(on_neighbors=0.5), "no-learning:batch-dependence"),
    "blind": (
        lambda: made_observation(on_input=0.0, on_input_fresh=0.0),
        "no-learning:output-independent-of-input",
    ),
    "certainty": (lambda: made_observation(certainty=True), "entropy-collapse:"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named_first(name: str) -> None:
    make, expected = FAULTS[name]
    found = list(faults_of(make(), Attempts()))
    assert f"{found[0].cause}:{found[0].fault}" == expected
    assert found[0].evidence
    assert found[0].advice


@pytest.mark.parametrize(
    "changes",
    [
        {"on_neighbors": None},
        {"on_neighbors": 1e-5},
        {"own_target": None},
        {"own_target": 0.9},
        {"on_input": 0.0, "on_input_fresh": 0.5},  # a dead model that new weights would wake
        {"on_input": None, "on_input_fresh": None},
    ],
)
def test_what_could_not_be_told_is_not_named(changes: dict[str, Any]) -> None:
    assert named(made_observation(**changes)) == []


@pytest.mark.parametrize("links", [torch.eye(32), torch.randint(0, 32, (2, 90))])
def test_samples_of_a_graph_may_depend_on_each_other(links: Tensor) -> None:
    o = made_observation(on_neighbors=0.9, own_target=0.05)
    assert named(replace(o, batches=[(links, *batch) for batch in o.batches])) == []


def of_sequences(target: Callable[[Tensor], Tensor], on_later: float) -> Observation:
    passes = []
    for ids in tokens():
        logits = uniform(*target(ids).shape, 11)
        seen = made_pass(logits.flatten(0, 1), target(ids).flatten())
        passes.append(replace(seen, inputs={"": ids}, targets={}, given=(ids,)))
    return replace(made_observation(), passes=passes, batches=tokens(), on_later=on_later)


@pytest.mark.parametrize("changes", [{"own_target": 0.0}, {"on_neighbors": 1.0}])
@pytest.mark.parametrize(("order", "named"), [(lambda x: x.argsort(descending=True), False), (None, True)])
def test_a_loss_that_sorts_its_batch_pairs_samples_rightly(
    changes: dict[str, Any], order: Callable[[Tensor], Tensor] | None, named: bool
) -> None:
    """Cox's partial likelihood needs the rows by time: what stands beside a row is no longer its neighbor."""
    batches = classes(number=4, inputs=4)
    plain = made_observation(batches, **changes)
    passes = [
        seen if order is None else replace(seen, given=(seen.given[0][order(seen.given[0][:, 0])],))
        for seen in plain.passes
    ]
    assert bool(list(faults_of(replace(plain, passes=passes), Attempts()))) == named


def test_a_sequence_model_that_sees_its_target() -> None:
    leak = ["suspicious-perfection:target-leak"]
    assert named(of_sequences(lambda ids: ids, on_later=0.0)) == leak
    assert named(of_sequences(lambda ids: ids[:, 1:], on_later=0.5)) == leak
    assert named(of_sequences(lambda ids: ids[:, 1:], on_later=0.0)) == []
    assert named(of_sequences(lambda ids: ids.flip(1), on_later=0.5)) == []  # a task that needs the whole sequence


def test_parts_without_a_gradient_before_and_after_a_trial() -> None:
    o = with_parameters(no_gradient=("a", "b"))
    assert partly_reached(o, set()) is None
    found = partly_reached(o, {"a", "b"})
    assert found is not None
    assert (found.cause, found.fault) == ("zero-gradient", "frozen-parameters")
    few = with_parameters(no_gradient=("a",), sizes=dict.fromkeys("abcdefgh", 0.1))
    assert partly_reached(few, {"a"}) is None
    zeros = with_parameters(no_gradient=("a", "b"), sizes={"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0})
    found = partly_reached(zeros, {"a", "b"})
    assert found is not None
    assert found.cause == "poor-initialisation"


def test_the_loss_of_the_best_constant() -> None:
    even = [(uniform(8, 2), torch.tensor([0, 1] * 4)) for _ in range(3)]
    assert trivial_loss(made_observation(even)) == pytest.approx(math.log(2))
    skewed = [(uniform(8, 2), torch.tensor([0] * 6 + [1] * 2)) for _ in range(3)]
    assert trivial_loss(made_observation(skewed)) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    targets = torch.cat([y for _, y in numbers()])
    assert trivial_loss(regression()) == pytest.approx(float(targets.var(unbiased=False)), rel=1e-5)
    smooth = trivial_loss(made_observation(even, lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2)))
    assert smooth == pytest.approx(math.log(2))
    absolute = made_observation([(x[:, :1], y) for x, y in numbers()], F.l1_loss)
    # why not exact: the median of a batch is nearer to it than that of all, as a guard takes it too
    assert trivial_loss(absolute) == pytest.approx(float((targets - targets.median()).abs().mean()), rel=0.05)
    binary = made_observation(
        [(uniform(8), torch.tensor([0.0] * 6 + [1.0] * 2))] * 3, F.binary_cross_entropy_with_logits
    )
    assert trivial_loss(binary) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: x.mean(),
        lambda x, y: F.cross_entropy(x, y) + x.square().mean(),
        lambda x, y: F.cross_entropy(x, y) + F.cross_entropy(-x, y),
        lambda x, y: F.cross_entropy(x, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ],
)
def test_no_best_constant_for_other_losses(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert trivial_loss(made_observation(loss=loss)) is None


@pytest.mark.parametrize(
    ("loss", "times"),
    [
        (lambda x, y: F.mse_loss(x, y, reduction="sum"), 8.0),
        (lambda x, y: F.mse_loss(x, y, reduction="none").mean(), 1.0),
        (lambda x, y: 0.5 * ((1.0 * x - y) ** 2).sum(1).mean(), 0.5),
        (lambda x, y: (y - 1.0 * x).square().sum(), 8.0),
    ],
)
def test_the_best_constant_of_a_loss_that_is_summed_or_written_by_hand(
    loss: Callable[[Tensor, Tensor], Tensor], times: float
) -> None:
    batches = [(uniform(8, 1), 2.0 * uniform(8, 1)) for _ in range(3)]
    variance = float(torch.cat([y for _, y in batches]).var(unbiased=False))
    assert trivial_loss(made_observation(batches, loss)) == pytest.approx(times * variance, rel=1e-4)


def test_adversarial_losses_are_known_by_their_constants() -> None:
    def two(x: Tensor, y: Tensor) -> Tensor:
        out = x[:, 0]
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out)) + F.binary_cross_entropy_with_logits(
            -out, torch.zeros_like(out)
        )

    assert made_observation(loss=two).is_adversarial
    assert not made_observation().is_adversarial
    seen = made_pass(uniform(8, 2), uniform(8, 2), lambda x, y: (x - y).relu().mean())
    networks = (nn.Linear(1, 1), nn.Linear(1, 1))
    critic = replace(seen, modules=(*networks, networks[1]))
    assert made_observation(passes=[critic]).is_adversarial
    assert not made_observation(passes=[replace(seen, modules=networks)]).is_adversarial
