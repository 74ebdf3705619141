"""What a run is built of, read from model, optimizer and graph; and which output of a model counts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from steadystep.records import Structure
from steadystep.signals import structure, structure_of
from steadystep.signals.batches import faintest, is_batch_first, main_tensor, spread_of
from steadystep.signals.structure import (
    around_graph,
    compares_outputs,
    graph_leaves,
    has_frozen_statistics,
    left_out,
    untrained_heads,
)


def of(model: nn.Module, *parameters: nn.Parameter, optimizer: type = torch.optim.SGD, **more: Any) -> Structure:
    return structure_of(model, optimizer(parameters or model.parameters(), **{"lr": 0.1} | more))


class TestStructure:
    def test_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
        model[1].weight.requires_grad_(False)
        found = of(model, model[0].weight, model[0].bias, model[1].weight)
        assert (found.trained, found.sizes) == (("0.weight", "0.bias"), (12, 4))
        assert (found.frozen, found.unheld) == (1, ("1.bias", "2.weight", "2.bias"))
        assert (found.last, found.last_frozen) == ("2.bias", False)
        assert found.fan_ins == (3, 0)
        model[2].bias.requires_grad_(False)
        assert of(model).last_frozen
        filters = nn.Conv1d(3, 5, kernel_size=7)
        assert of(filters).fan_ins == (21, 0)

    def test_groups(self) -> None:
        model = nn.Linear(2, 1)
        groups = [
            {"params": [model.weight], "lr": 0.0, "weight_decay": 0.3, "initial_lr": 0.5},
            {"params": [model.bias], "max_lr": 0.7, "momentum": 0.8},
        ]
        found = structure_of(model, torch.optim.SGD(groups, lr=0.1))
        assert (found.announced, found.weight_decay, found.momentum) == (0.7, 0.3, 0.8)
        assert found.rate_zero == ("weight",)
        tensor = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0))
        assert structure_of(model, tensor).rate_zero == ()  # a tensor is not read

    @pytest.mark.parametrize(
        ("kind", "decoupled", "scale_free"),
        [
            (torch.optim.SGD, False, False),
            (torch.optim.ASGD, False, False),
            (torch.optim.AdamW, True, True),
            (torch.optim.Adam, False, True),
        ],
    )
    def test_kinds_of_optimizers(self, kind: type, decoupled: bool, scale_free: bool) -> None:
        found = of(nn.Linear(2, 1), optimizer=kind)
        assert (found.decoupled, found.scale_free) == (decoupled, scale_free)

    def test_decay_may_be_decoupled_by_a_setting(self) -> None:
        assert of(nn.Linear(2, 1), optimizer=torch.optim.Adam, decoupled_weight_decay=True).decoupled

    def test_modules(self) -> None:
        model = nn.Sequential(
            nn.Embedding(7, 3), nn.Dropout(0.2), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Dropout1d(0.0), nn.Dropout(0.5)
        )
        found = of(model)
        assert (found.dropout, found.dropouts) == (0.5, ("3", "5"))
        assert (found.norms, found.modes, found.table_rows) == (1, 4, 7)
        assert of(model.eval()).norms == 0
        assert of(model).modes == 4
        plain = of(nn.Linear(1, 1))
        assert (plain.dropout, plain.dropouts, plain.norms, plain.modes, plain.table_rows) == (0.0, (), 0, 0, 0)

    @pytest.mark.parametrize(
        ("body", "adapter", "frozen"),
        [
            (nn.Linear(2, 4), None, True),  # of the same size, and elsewhere
            (nn.Linear(3, 4), nn.Linear(4, 1, bias=False), True),  # beside it, and of another size
            (nn.Linear(3, 4), nn.Linear(1, 2, bias=False), False),
        ],
    )
    def test_a_frozen_head_may_have_an_adapter(self, body: nn.Module, adapter: nn.Module | None, frozen: bool) -> None:
        head = nn.ModuleDict({"base": nn.Linear(4, 2).requires_grad_(False)})
        if adapter is not None:
            head = nn.ModuleDict({"lora": adapter, **head})
        assert of(nn.ModuleDict({"body": body, "head": head})).last_frozen is frozen

    def test_precisions(self) -> None:
        model = nn.Sequential(nn.Linear(1, 1).half(), nn.Linear(1, 1, bias=False).bfloat16())
        found = of(model)
        assert (found.half, found.coarse) == (2, 1)

    def test_statistics_are_frozen_where_all_are(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        assert not has_frozen_statistics(model)
        model[0].eval()
        assert not has_frozen_statistics(model)
        model[1].eval()
        assert has_frozen_statistics(model)
        assert not has_frozen_statistics(nn.Linear(1, 1).eval())


class TestGraph:
    def test_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, free = nn.Linear(2, 1), torch.ones(1, requires_grad=True)
        output = model(torch.ones(3, 2)).sum() + free
        assert set(graph_leaves(output) or ()) == {id(model.weight), id(model.bias), id(free)}
        assert around_graph(output, nn.Identity(), [], [], None) == {"outside": 2}  # parameters only
        assert around_graph(output, nn.Identity(), [model.bias], [], None) == {"outside": 1}
        assert around_graph(output, model, [], [], None) == {"outside": 0}
        assert around_graph(output, nn.Identity(), [], [model.weight], None) == {"outside": 1}
        assert graph_leaves(torch.ones(1)) == {}
        monkeypatch.setattr(structure, "_MOST_NODES", 3)
        assert graph_leaves(output) is None
        assert around_graph(output, nn.Identity(), [], [], None) == {"outside": 0}

    def test_what_the_loss_is_computed_from_at_once(self) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        body, head = {id(p) for p in model[0].parameters()}, {id(p) for p in model[2].parameters()}
        loss = model(torch.ones(4, 2)).mean()
        assert untrained_heads(loss, model, body) == ("2.bias", "2.weight")
        assert untrained_heads(loss, model, head) == ()  # a body under a new head
        assert untrained_heads(loss, model, body | {id(model[2].bias)}) == ()
        assert untrained_heads(torch.ones(1), model, set()) == ()

    def test_what_is_left_out(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 1, bias=False)})
        a, b = model["a"].weight, model["b"].weight
        loss = model["b"](model["a"](torch.ones(1, 2)).detach()).sum()
        held = {id(a), id(b)}
        assert left_out(loss, model, held, held) == {"untrained": (), "unheld": (), "severed": ("a.weight",)}
        assert left_out(loss, model, held, {id(b)})["severed"] == ()  # it was not computed with
        assert left_out(loss, model, {id(b)}, held)["severed"] == ()  # nothing holds it
        assert left_out(loss, model, {id(a)}, held)["unheld"] == ("b.weight",)
        assert left_out(torch.ones(1), model, held, held)["severed"] == ()
        alone = model["a"](torch.ones(1, 2)).sum()
        assert left_out(alone, model, set(), held)["unheld"] == ("a.weight",)  # the loss does not depend on the other


class TestOutputs:
    def test_the_logits_count(self) -> None:
        loss, logits = torch.ones(()), torch.ones(2, 3)
        assert main_tensor({"loss": torch.ones(1), "logits": logits}) is logits
        assert main_tensor((loss, torch.ones(2, dtype=torch.long), torch.ones(0, 2), logits)) is logits
        assert main_tensor("none") is None

    @pytest.mark.parametrize(
        ("given", "inputs", "targets", "first"),
        [
            ((8, 5, 3), (8, 5), (8,), True),
            ((5, 8, 3), (8, 5), (8,), False),
            ((8, 8, 3), (8, 8), (8,), False),  # either way
            ((8, 5, 3), (8, 5), (8, 5), False),
            ((8, 5, 3), (8, 5), (7,), False),
            ((8, 5, 3), (8,), (8,), False),
        ],
    )
    def test_samples_come_first(
        self, given: tuple[int, ...], inputs: tuple[int, ...], targets: tuple[int, ...], first: bool
    ) -> None:
        batch = [("x", torch.zeros(inputs)), ("y", torch.zeros(targets))]
        assert is_batch_first(given, batch) is first
        assert not is_batch_first(given, batch[:1])

    def test_how_far_samples_are_apart(self) -> None:
        values = torch.tensor([[0.0, 1.0], [2.0, 5.0]])
        assert spread_of(values).item() == pytest.approx(math.sqrt((1.0 + 4.0) / 2))
        for nothing in (None, values[:1], values.to(torch.complex64)):
            assert math.isnan(spread_of(nothing).item())

    def test_the_faintest_of_the_other_outputs(self) -> None:
        main, other = torch.randn(4, 2), torch.tensor([[3.0, 3.0], [5.0, 5.0], [3.0, 3.0], [5.0, 5.0]])
        expected = 1.0 / math.sqrt(17.0)
        assert faintest((main, other), main).item() == pytest.approx(expected)
        assert faintest((main, other, other * 10.0 + 1000.0), main).item() == pytest.approx(10.0 / 1040.0, rel=1e-2)
        left: list[Tensor] = [other[:3], other[:, 0], other.long()]
        assert math.isnan(faintest((main, *left), main).item())
        assert math.isnan(faintest((main[:1], other[:1]), main[:1]).item())


def _embedded() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(12, 4)


COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two views": lambda a, b: cross_entropy(a @ b.T, torch.arange(12)),
    "the positive first": lambda a, b: cross_entropy(
        torch.cat([(a * b).sum(1, keepdim=True), a @ b.roll(1, 0).T], 1), torch.zeros(12).long()
    ),
    "a queue of negatives": lambda a, b: cross_entropy(
        torch.cat([(a * b.detach()).sum(1, keepdim=True), a @ torch.ones(3, 9)], 1), torch.zeros(12).long()
    ),
    "pairs": lambda a, b: binary_cross_entropy_with_logits(a[:, 0] - b[:, 0], torch.ones(12)),
    "a ranking": lambda a, b: cross_entropy(a[:, 0].view(3, 4), torch.zeros(3).long()),
}
OF_CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classes": lambda a, b: cross_entropy(a, torch.ones(12).long()),
    "two batches as one": lambda a, b: cross_entropy(torch.cat([a, b]), torch.ones(24).long()),
    "centred scores": lambda a, b: cross_entropy(a - a.logsumexp(1, keepdim=True), torch.ones(12).long()),
    "one score": lambda a, b: binary_cross_entropy_with_logits(a[:, 0], torch.ones(12)),
}


@pytest.mark.parametrize("name", [*COMPARISONS, *OF_CLASSES])
def test_outputs_that_are_compared_with_each_other(name: str) -> None:
    net, x = _embedded()
    loss = (COMPARISONS | OF_CLASSES)[name](net(x), net(x + 1.0))
    assert compares_outputs(loss) is (name in COMPARISONS)
    loss.backward()
    assert compares_outputs(loss) is (name in COMPARISONS)  # watch asks after the backward pass


def test_a_normalized_head_and_attention_compare_no_samples() -> None:
    net, x = _embedded()
    head = nn.Parameter(torch.randn(5, 3))
    assert not compares_outputs(cross_entropy(net(x) @ normalize(head).T, torch.ones(12).long()))
    encoder = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3))
    assert not compares_outputs(cross_entropy(encoder(x[None]).flatten(0, 1), torch.ones(12).long()))
    assert not compares_outputs(torch.ones(1))
