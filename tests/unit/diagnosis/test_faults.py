"""The particular fault of whole runs under a guard, working twins, and runs that cannot be judged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.records import Diagnosis

Batches = Callable[[int], Any]
CENTERS = torch.randn(4, 16, generator=torch.Generator().manual_seed(7))


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4), *more)


def classes(step: int, *, count: int = 32) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    y = torch.randint(4, (count,), generator=rng)
    return CENTERS[y] + torch.randn(count, 16, generator=rng), y


def entropy(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda batch: functional.cross_entropy(model(batch[0]), batch[1])


def diagnosed(
    model: nn.Module,
    batches: Batches = classes,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 150,
    give_batch: bool = True,
    after: Callable[[], None] = lambda: None,
) -> Diagnosis:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = loss or entropy(model)
    with steadystep.Guard(model, optimizer, config={"monitoring": {"sinks": []}}) as guard:
        for step in range(num_steps):
            batch = batches(step)
            if give_batch:
                guard.step(loss, batch=batch)
            else:
                guard.step(lambda batch=batch: loss(batch))
            after()
        return guard.diagnose()[0]


def told(diagnosis: Diagnosis) -> tuple[str, str]:
    return diagnosis.cause, diagnosis.fault


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def shuffled(step: int) -> tuple[Tensor, Tensor]:
    x, y = classes(step)
    return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize("give_batch", [True, False])
@pytest.mark.parametrize(
    ("batches", "fault"),
    [
        (shuffled, "labels-shuffled"),
        (lambda step: (classes(step)[0], torch.full((32,), 2)), "constant-targets"),
        (lambda step: (torch.ones(32, 16), classes(step)[1]), "constant-inputs"),
        (classes, ""),
    ],
)
def test_faults_in_the_data(batches: Batches, fault: str, give_batch: bool) -> None:
    found = diagnosed(net(), batches, give_batch=give_batch)
    assert told(found) == (("no-learning", fault) if fault else ("healthy", "")), found


def test_labels_that_are_all_ignored() -> None:
    model = net()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        total = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return total / (batch[1] >= 0).sum().clamp(min=1)

    found = diagnosed(model, lambda step: (classes(step)[0], torch.full((32,), -100)), loss)
    assert told(found) == ("zero-gradient", "all-ignored-targets"), found


def test_the_same_samples_in_new_tensors_but_not_the_whole_data_set() -> None:
    assert diagnosed(net(), lambda step: classes(0)).cause == "repeated-batch"
    whole = classes(0)
    assert diagnosed(net(), lambda step: whole).cause == "healthy"


@pytest.mark.parametrize("give_batch", [True, False])
def test_activations_that_are_applied_twice(give_batch: bool) -> None:
    model = net(nn.Softmax(-1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    assert told(diagnosed(model, optimizer=sgd, give_batch=give_batch)) == ("no-learning", "wrong-loss")
    model = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), (batch[1] > 1).float())

    assert told(diagnosed(model, loss=loss, give_batch=True)) == ("no-learning", "wrong-loss")


def test_losses_that_do_not_fit_the_output() -> None:
    model = net()
    nll = diagnosed(model, loss=lambda batch: functional.nll_loss(model(batch[0]), batch[1]))
    assert told(nll) == ("no-learning", "wrong-loss"), nll
    column = nn.Linear(16, 1)

    def squares(batch: tuple[Tensor, Tensor]) -> Tensor:
        return (column(batch[0]) - batch[0][:, 0]).square().mean()  # [32, 1] - [32]

    found = diagnosed(column, lambda step: (x := classes(step)[0], x[:, 0].clone()), squares)
    assert told(found) == ("no-learning", "wrong-loss"), found
    assert "broadcast" in found.evidence


def test_a_softmax_over_the_batch() -> None:
    found = diagnosed(net(nn.Softmax(0)))
    assert told(found) == ("no-learning", "softmax-axis"), found


def test_a_recurrent_layer_that_reads_the_batch_as_time() -> None:
    class Net(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 16, batch_first=batch_first), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    def batches(step: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (32,), generator=torch.Generator().manual_seed(step))
        x = 0.1 * torch.randn(32, 6, 4)
        x[torch.arange(32), 0, y] += 2.0
        return x, y

    wrong, right = (
        diagnosed(model, batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
        for model in (Net(False), Net(True))
    )
    assert told(wrong) == ("no-learning", "batch-dependence"), wrong
    assert right.cause == "healthy", right


def test_parameters_that_nothing_trains() -> None:
    model = net()
    body = torch.optim.Adam(model[0].parameters(), lr=1e-4)
    assert told(diagnosed(model, optimizer=body)) == ("no-learning", "wrong-optimizer-params")

    model = net()
    found = diagnosed(model, loss=lambda b: functional.cross_entropy(model[2](model[:2](b[0]).detach()), b[1].flip(0)))
    assert told(found) == ("zero-gradient", "frozen-parameters"), found

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(16, 1), nn.Linear(1, 16)]  # no ModuleList
            self.bias = nn.Parameter(torch.zeros(4))
            self.register_buffer("mix", torch.randn(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return 0.01 * self.layers[1](self.layers[0](x)) @ self.mix + self.bias

    found = diagnosed(Listed())
    assert told(found) == ("no-learning", "frozen-parameters"), found
    assert "4 parameters" in found.evidence


def test_a_head_that_is_trained_alone_is_no_fault() -> None:
    model = net()
    found = diagnosed(model, optimizer=torch.optim.Adam(model[2].parameters(), lr=1e-2), num_steps=300)
    assert found.cause == "healthy", found


def test_rates_of_zero_and_schedules_that_end_early() -> None:
    model = net()
    assert diagnosed(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.0)).cause == "learning-rate-too-low"
    for factor in (lambda step: 0.0, lambda step: 0.7**step):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        assert diagnosed(model, optimizer=optimizer, after=schedule.step).cause == "schedule-error"


def test_regularisation_and_mode() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.97), nn.Linear(32, 4))
    assert told(diagnosed(model)) == ("no-learning", "regularisation-too-strong")
    model = net()
    decay = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5.0)
    assert told(diagnosed(model, optimizer=decay)) == ("no-learning", "regularisation-too-strong")
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).eval()
    assert told(diagnosed(model, shuffled)) == ("no-learning", "eval-mode")
    assert diagnosed(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).eval()).cause == "healthy"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_concluded_through_the_noise_of_heavy_tails(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def batches(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 16)
        return x, 0.5 * x[:, 0] + torch.distributions.StudentT(2.1).sample((32,))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]).squeeze(1), batch[1])

    found = diagnosed(model, batches, loss, num_steps=400)
    assert found.cause in ("healthy", "bad-batch", "exploding-gradient"), found


@pytest.mark.parametrize("gradients", ["kept", "cleared", "set to zero"])
def test_gradients_that_a_loop_does_not_clear(gradients: str) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with steadystep.watch(model, optimizer, config={"monitoring": {"sinks": []}}) as watcher:
        for step in range(60):
            entropy(model)(classes(step)).backward()
            optimizer.step()
            if gradients != "kept":
                optimizer.zero_grad(set_to_none=gradients == "cleared")
        found = watcher.guard.diagnose()[0]
    assert (found.cause == "missing-zero-grad") == (gradients == "kept"), found


def test_an_optimizer_that_begins_anew_in_every_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with steadystep.watch(model, optimizer, config={"monitoring": {"sinks": []}}) as watcher:
        for step in range(60):
            optimizer.zero_grad()
            entropy(model)(classes(step)).backward()
            optimizer.step()
            optimizer.state.clear()
        assert watcher.guard.diagnose()[0].cause == "lost-moments"


def test_a_feature_that_is_the_target() -> None:
    model = net()

    def with_label(step: int) -> tuple[Tensor, Tensor]:
        x, y = classes(step)
        return torch.cat([x[:, :-1], y[:, None] * 2.0 - 1.0], 1), y

    assert diagnosed(model, with_label).fault == "target-leak"


def test_outputs_that_hardly_depend_on_the_input() -> None:
    model = net()
    found = diagnosed(model, loss=lambda batch: functional.cross_entropy(model(1.0 + 1e-4 * batch[0]), batch[1]))
    assert found.fault == "output-independent-of-input", found


def test_targets_far_from_unit_scale() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]).squeeze(1), batch[1])

    found = diagnosed(model, lambda step: (x := classes(step)[0], 2e5 + 4e4 * x[:, 0]), loss)
    assert told(found) == ("unscaled-data", "unscaled-targets"), found


def test_weights_are_judged_as_they_were_before_the_first_update() -> None:
    model = net()
    with steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e4)) as guard:
        for step in range(3):
            guard.step(entropy(model), batch=classes(step))
        facts = guard._parts.run_history.facts()
    assert facts.measured.initial is not None
    assert facts.weights_above(1.0) == ()
    for weight in (model[0].weight, model[2].weight):
        nn.init.constant_(weight, 0.5)
    found = diagnosed(model, shuffled)
    assert found.cause == "poor-initialisation", found
    assert "equal before the first update" in found.evidence


def test_what_cannot_be_judged_is_said_to_be_so() -> None:
    short = diagnosed(net(), num_steps=35)
    assert (short.cause, short.evidence) == ("healthy", "too short to tell: nothing found in 35 updates")
    model = net()
    signed = diagnosed(model, loss=lambda batch: model(batch[0]).square().mean().sqrt() - 5.0)
    assert signed.cause == "healthy", signed
    assert "learning not judged: the loss goes below zero" in signed.evidence
    flat = diagnosed(model, loss=lambda batch: 3.0 + 1e-6 * model(batch[0]).mean().abs(), num_steps=250)
    assert "what it measures is unknown" in flat.evidence or flat.cause != "healthy"


def test_rewards_that_never_change() -> None:
    model = net()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        chances = functional.log_softmax(model(batch["state"]), -1).gather(1, batch["action"][:, None])
        return -(chances.squeeze(1) * batch["reward"]).mean()

    def rollout(step: int) -> dict[str, Tensor]:
        x, y = classes(step)
        return {"state": x, "action": y, "reward": torch.ones(32)}

    assert diagnosed(model, rollout, loss).cause == "flat-reward"


def test_a_diagnosis_that_nobody_asked_for_stays_away_from_the_new_rules() -> None:
    from steadystep.diagnosis.ranking import rank

    model = net()
    with steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=3e-3)) as guard:
        for step in range(150):
            guard.step(entropy(model), batch=(classes(step)[0], torch.full((32,), 2)))
        facts = guard._parts.run_history.facts()
    assert [d.cause for d in rank(facts, live=True)] == ["healthy"]
    assert rank(facts)[0].fault == "constant-targets"


@pytest.mark.parametrize("word", ["no", False])
def test_accelerates_word_for_single_precision(word: object) -> None:
    assert steadystep.Config.load({"training": {"mixed_precision": word}}).training.mixed_precision == "fp32"
