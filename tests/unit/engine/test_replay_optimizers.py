"""Updates that are made again after a rollback come out bit for bit, whatever optimizer makes them; or it is said."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.optim import Optimizer

import steadystep
from steadystep.records import Outcome
from steadystep.tracking.log_format import describe

STEPS, DAMAGED = 66, 52
Make = Callable[["Net"], Optimizer | list[Optimizer]]


class Net(nn.Module):
    """Matrices for Muon, vectors for others, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.second, self.last = nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.drop(torch.tanh(self.norm(self.first(x)))))))

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() == 2]

    def vectors(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() != 2]


def of_torch(name: str, **options: Any) -> Make:
    return lambda net: getattr(torch.optim, name)(net.parameters(), **{"lr": 0.01} | options)


def of_others(name: str, **options: Any) -> Make:
    def make(net: Net) -> Optimizer:
        others = pytest.importorskip("schedulefree" if name.endswith("ScheduleFree") else "pytorch_optimizer")
        made = getattr(others, name)(net.parameters(), **{"lr": 0.01} | options)
        if name.endswith("ScheduleFree"):
            made.train()
        return made

    return make


def other_muon(net: Net) -> Optimizer:
    others = pytest.importorskip("pytorch_optimizer")
    groups = [{"params": net.matrices(), "use_muon": True}, {"params": net.vectors(), "use_muon": False}]
    return others.Muon(groups, lr=0.01)


def lookahead(net: Net) -> Optimizer:
    return pytest.importorskip("pytorch_optimizer").Lookahead(torch.optim.AdamW(net.parameters(), lr=0.01), k=3)


def schedule_free_and_sgd(net: Net) -> list[Optimizer]:
    free = pytest.importorskip("schedulefree").AdamWScheduleFree(net.matrices(), lr=torch.tensor(0.01))
    free.train()
    return [free, torch.optim.SGD(net.vectors(), lr=0.01, momentum=0.9)]


EACH: dict[str, Make] = {
    "SGD with Nesterov momentum": of_torch("SGD", momentum=0.9, nesterov=True),
    "Adam": of_torch("Adam"),
    "AdamW": of_torch("AdamW"),
    "AdamW, fused": of_torch("AdamW", fused=True),
    "AdamW, foreach": of_torch("AdamW", foreach=True),
    "AdamW, amsgrad": of_torch("AdamW", amsgrad=True),
    "AdamW, tensor learning rate": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01)),
    "Adam, fused, tensor learning rate": lambda n: torch.optim.Adam(n.parameters(), lr=torch.tensor(0.01), fused=True),
    "NAdam": of_torch("NAdam"),
    "RAdam": of_torch("RAdam"),
    "RMSprop": of_torch("RMSprop", lr=0.003, momentum=0.5),
    "Adagrad": of_torch("Adagrad"),
    "ASGD": of_torch("ASGD"),
    "Rprop": of_torch("Rprop", lr=0.001),
    "Adafactor": of_torch("Adafactor"),
    "Muon (torch), matrices only": lambda net: torch.optim.Muon(net.matrices(), lr=0.01),
    "AdamWScheduleFree": of_others("AdamWScheduleFree"),
    "SGDScheduleFree": of_others("SGDScheduleFree"),
    "RAdamScheduleFree": of_others("RAdamScheduleFree"),
    "SOAP": of_others("SOAP", precondition_frequency=5),
    "Muon (pytorch_optimizer)": other_muon,
    "Prodigy": of_others("Prodigy", lr=1.0),
    "Lion": of_others("Lion", lr=0.001),
    "StableAdamW": of_others("StableAdamW"),
    "Shampoo": of_others("Shampoo"),
    "Adan": of_others("Adan"),
    "LAMB": of_others("Lamb"),
    "Kron": of_others("Kron", lr=0.001),
    "ADOPT": of_others("ADOPT"),
    "Lookahead": lookahead,
    "[Muon, AdamW]": lambda n: [torch.optim.Muon(n.matrices(), lr=0.01), torch.optim.AdamW(n.vectors(), lr=0.01)],
    "[AdamWScheduleFree, SGD]": schedule_free_and_sgd,
}
QUICK = (
    "AdamW, tensor learning rate",
    "AdamWScheduleFree",
    "SOAP",
    "Muon (pytorch_optimizer)",
    "Lookahead",
    "[Muon, AdamW]",
)


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, 24, 8, generator=torch.Generator().manual_seed(7)))


def loss_of(net: Net, x: Tensor) -> Tensor:
    return (net(x).squeeze(-1) - x.sum(-1)).square().mean()


def train(
    make: Make,
    *,
    damaged: bool = False,
    loss: Callable[[Net, Tensor], Tensor] = loss_of,
    each: Callable[[Net, int], None] = lambda *_: None,
) -> tuple[dict[str, Any], Outcome | None]:
    """Everything that the loop owns at its end, and what was done about the damage."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net()
    made = make(net)
    guard = steadystep.Guard(net, made)
    back = None
    for step, x in enumerate(batches()):
        if damaged and step == DAMAGED:
            with torch.no_grad():
                net.second.weight[3, 2] = math.nan
        outcome = guard.step(lambda x: loss(net, x), batch=x)
        back = outcome if outcome.restored is not None else back
        each(net, step)
    optimizers = made if isinstance(made, list) else [made]
    drawn = (torch.rand(1), random.random(), np.random.rand())
    owned = (net.state_dict(), [optimizer.state_dict() for optimizer in optimizers], drawn)
    state = dict(leaves(owned, ""))
    guard.close()
    return state, back


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Tensor):
        yield path, tree.detach().clone()
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, repr(tree)


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    assert left.keys() == right.keys()
    pairs = ((name, value, right[name]) for name, value in left.items())
    return [name for name, a, b in pairs if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b)]


def assert_exact(make: Make, **run: Any) -> None:
    expected, _ = train(make, **run)
    got, back = train(make, damaged=True, **run)
    assert back is not None
    assert back.plan.actions == ("rollback", "replay")
    assert back.replayed > 20
    assert differing(got, expected) == []
    assert back.exact
    assert "(bit-identical)" in describe(back)


@pytest.mark.parametrize("name", QUICK)
def test_damage_costs_nothing(name: str) -> None:
    assert_exact(EACH[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EACH if name not in QUICK])
def test_damage_costs_nothing_with_others(name: str) -> None:
    assert_exact(EACH[name])


def by_hand(make: Make, steps: int, *, guarded: bool, bad: int | None = None) -> dict[str, Any]:
    """A short run, with the guard or without; the batch `bad` is NaN and without the guard is left out."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net()
    net.drop = nn.Identity()  # a batch that is left out would draw no numbers
    made = make(net)
    optimizers = made if isinstance(made, list) else [made]
    guard = steadystep.Guard(net, made) if guarded else None
    for step, x in enumerate(batches()[:steps]):
        data = x * math.nan if step == bad else x
        if guard is not None:
            assert guard.step(lambda data: loss_of(net, data), batch=data).stepped == (step != bad)
        elif step != bad:
            loss_of(net, data).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    owned = (net.state_dict(), [optimizer.state_dict() for optimizer in optimizers])
    state = dict(leaves(owned, ""))
    if guard is not None:
        guard.close()
    return state


def assert_untouched(make: Make) -> None:
    assert differing(by_hand(make, 12, guarded=True), by_hand(make, 12, guarded=False)) == []
    assert differing(by_hand(make, 12, guarded=True, bad=7), by_hand(make, 12, guarded=False, bad=7)) == []


@pytest.mark.parametrize("name", QUICK)
def test_healthy_runs_are_the_plain_loop_and_a_nan_leaves_no_trace(name: str) -> None:
    assert_untouched(EACH[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EACH if name not in QUICK])
def test_healthy_runs_are_the_plain_loop_with_others(name: str) -> None:
    assert_untouched(EACH[name])


def test_the_table_in_the_documents_is_what_is_tested() -> None:
    page = (Path(__file__).parents[3] / "docs" / "support.md").read_text()
    section = page.split("### Optimizer by optimizer", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(EACH)


class Counting(torch.optim.SGD):
    """Its steps grow shorter with a count on itself, and turn now and then by a draw from a generator of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count, self.turns = 0, {"last": torch.zeros(2)}
        self.rng, self.own = random.Random(3), torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.turns["last"][0] += self.rng.random() + float(torch.rand(1, generator=self.own))
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01 / (1.0 + 0.01 * self.count * float(self.turns["last"][0])))


def test_what_an_optimizer_keeps_on_itself_goes_back_too() -> None:
    assert_exact(lambda net: Counting(net.parameters(), lr=0.01))


class NoRate(Optimizer):
    """No learning rate in its groups, and a state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"length": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["length"] / self.state["all"]["steps"] ** 0.1)


def test_an_optimizer_without_a_learning_rate() -> None:
    assert_exact(lambda net: NoRate(net.parameters()))


class OwnRate(torch.optim.SGD):
    """It sets its own learning rate after each update."""

    def step(self, closure: Any = None) -> None:
        super().step()
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        self.param_groups[0]["lr"] *= 1.0 + 1e-3 * (1.0 - float(norm))


def test_an_optimizer_that_sets_its_own_learning_rate() -> None:
    assert_exact(lambda net: OwnRate(net.parameters(), lr=0.01))


def noisy(draw: Callable[[Tensor], Any]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: loss_of(net, x + 0.1 * draw(x))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: random.gauss(0.0, 1.0),
        lambda x: float(np.random.randn()),
        lambda x: torch.from_numpy(np.random.standard_normal(x.shape)).float() + random.random(),
        lambda x: dropout(torch.ones_like(x), 0.3),
    ],
    ids=["Python", "NumPy", "both", "torch, by no module"],
)
def test_a_closure_that_draws_random_numbers(draw: Callable[[Tensor], Any]) -> None:
    def without_dropout(net: Net) -> Optimizer:
        net.drop = nn.Identity()
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    assert_exact(without_dropout, loss=noisy(draw))


HIDDEN = {"steps": 0}


class Hiding(torch.optim.SGD):
    """It counts where nobody can find it."""

    def step(self, closure: Any = None) -> None:
        HIDDEN["steps"] += 1
        self.param_groups[0]["lr"] = 0.01 / (1.0 + 0.0001 * HIDDEN["steps"])
        super().step()


def test_it_is_not_claimed_where_the_optimizer_counts_elsewhere() -> None:
    def make(net: Net) -> Optimizer:
        HIDDEN["steps"] = 0
        return Hiding(net.parameters(), lr=0.01)

    expected, _ = train(make)
    got, back = train(make, damaged=True)
    assert back is not None
    assert differing(got, expected)
    assert not back.exact
    assert back.replayed == 0 or "(not verified as bit-identical)" in describe(back)


def test_it_is_not_claimed_where_the_loop_changes_weights_itself() -> None:
    def shrink(net: Net, step: int) -> None:
        with torch.no_grad():
            net.last.weight.mul_(0.9999)

    expected, _ = train(EACH["AdamW"], each=shrink)
    got, back = train(EACH["AdamW"], damaged=True, each=shrink)
    assert back is not None
    assert differing(got, expected)
    assert not back.exact


def test_it_is_not_claimed_where_a_weight_that_no_loss_shows_is_changed_by_the_loop() -> None:
    """The younger state tells, which the rollback has passed over."""

    def make(net: Net) -> Optimizer:
        net.unused = nn.Parameter(torch.ones(3))
        net.counter = nn.Parameter(torch.ones(3))
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    def move(net: Net, step: int) -> None:
        with torch.no_grad():
            net.unused += 1.0
            net.counter += 1.0

    expected, _ = train(make, each=move)
    got, back = train(make, damaged=True, each=move)
    assert back is not None
    assert set(differing(got, expected)) >= {"/0/unused", "/0/counter"}
    assert back.replayed > 0
    assert not back.exact
