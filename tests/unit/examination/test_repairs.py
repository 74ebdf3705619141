"""What can be tried with a job, in which order, and what each trial changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import SGD

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination import Examination, examine
from steadystep.examination.comparison import realigned
from steadystep.examination.passes import Pass, observe_passes
from steadystep.examination.repairs import Repair, repairs, restart, restart_plainly
from tests.unit.examination.jobs import Job, adam, classes, mlp, numbers, supervised
from tests.unit.examination.made import bench_of

ALWAYS = {"mixed-batches", "lr/10", "lr/100", "lr*10", "lr*100", "lr*1000", "plain-init", "large-batches"}


def offered(job: Job, left_out: tuple[str, ...] = (), **options: Any) -> dict[str, Repair]:
    bench = bench_of(job, **options)
    return {repair.name: repair for repair in repairs(bench, observe_passes(bench)[0], left_out)}


def test_a_plain_job_is_offered_no_particular_repair() -> None:
    assert set(offered(supervised(mlp(), classes()))) == ALWAYS


@pytest.mark.parametrize(
    ("job", "options", "name"),
    [
        (lambda: supervised(mlp(), classes()), {"left_out": ("0.weight",)}, "all-parameters"),
        (lambda: supervised(mlp(), classes()), {"max_grad_norm": 0.1}, "no-clipping"),
        (lambda: supervised(mlp().eval(), classes()), {}, "train-mode"),
        (lambda: supervised(m := mlp(), classes(), optimizer=adam(m, weight_decay=1.0)), {}, "no-decay"),
        (lambda: supervised(nn.Sequential(nn.Dropout(0.5), mlp()), classes()), {}, "no-dropout"),
        (lambda: supervised(mlp(), [(x + 100.0, y) for x, y in classes()]), {}, "scaled-inputs"),
        (lambda: supervised(mlp(), [(x * 100.0, y) for x, y in classes()]), {}, "scaled-inputs"),
        (lambda: supervised(mlp(), [(x * 1e-3, y) for x, y in classes()]), {}, "scaled-inputs"),
        (
            lambda: supervised(mlp(8, 1), [(x, 1e3 * y) for x, y in numbers()], nn.functional.mse_loss),
            {},
            "scaled-targets",
        ),
    ],
)
def test_a_setting_or_a_property_of_the_data_is_undone(job: Any, options: dict[str, Any], name: str) -> None:
    found = offered(job(), **options)
    assert name in found
    assert set(found) - ALWAYS <= {name, f"{name}-fresh"}


def test_every_repair_has_a_cause_and_an_advice() -> None:
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    job = supervised(model, [(x + 100.0, y) for x, y in classes()], optimizer=adam(model, weight_decay=1.0))
    for repair in offered(job, ("1.0.weight",), max_grad_norm=1.0).values():
        assert repair.cause in set(Cause)
        assert not repair.fault or repair.fault in set(Fault)
        assert "tried" in repair.advice
        assert repair.what


def test_particular_repairs_come_before_rates() -> None:
    model = mlp()
    job = supervised(model, [(x + 100.0, y) for x, y in classes()], optimizer=adam(model, weight_decay=1.0))
    names = list(offered(job))
    assert max(names.index("no-decay"), names.index("scaled-inputs")) < names.index("lr/10") < names.index("plain-init")
    tiny = list(offered(supervised(mlp(), [(x[:2], y[:2]) for x, y in classes()])))
    assert tiny.index("large-batches") < tiny.index("lr/10")


def test_larger_batches_reach_a_usual_size() -> None:
    usual, tiny = classes(), [(x[:2], y[:2]) for x, y in classes()]
    for batches, times in ((usual, 8), (tiny, 32)):
        repair = offered(supervised(mlp(), batches))["large-batches"]
        assert repair.variation.batches is not None
        joined = len(repair.variation.batches[0][0]) // len(batches[0][0])
        assert 1 < joined <= times
        assert f"batches {joined} times as large" in repair.what


def test_inputs_are_standardized_and_targets_stay() -> None:
    batches = [(100.0 * x + 500.0, y) for x, y in classes()]
    change = offered(supervised(mlp(), batches))["scaled-inputs"].variation.change
    assert change is not None
    changed = [change(batch) for batch in batches]
    whole = torch.cat([x for x, _ in changed])
    assert whole.mean(0).abs().max() < 0.3
    assert (whole.std(0) - 1.0).abs().max() < 0.3
    assert all(torch.equal(new[1], old[1]) for new, old in zip(changed, batches, strict=True))
    assert float(batches[0][0].mean()) > 400.0


def test_samples_are_exchanged_between_batches() -> None:
    batches = classes()
    bench = bench_of(supervised(mlp(), batches))
    mixed = offered(supervised(mlp(), batches))["mixed-batches"].variation.batches
    assert mixed is not None
    own, dealt = (torch.cat([x for x, _ in each]) for each in (bench.batches, mixed))
    assert not torch.equal(own, dealt)
    assert torch.equal(own[own[:, 0].argsort()], dealt[dealt[:, 0].argsort()])
    pairs = {tuple(row.tolist()): int(label) for x, y in batches for row, label in zip(x, y, strict=True)}
    assert all(pairs[tuple(row.tolist())] == int(label) for x, y in mixed for row, label in zip(x, y, strict=True))


def test_batches_that_do_not_fit_together_are_not_mixed() -> None:
    uneven = [(x[:, : 4 + i % 2], y) for i, (x, y) in enumerate(classes())]
    model = nn.Linear(1, 4)
    job = supervised(model, uneven, lambda out, y: nn.functional.cross_entropy(out, y))
    job = job._replace(loss=lambda b: nn.functional.cross_entropy(model(b[0].mean(1, keepdim=True)), b[1]))
    assert "mixed-batches" not in offered(job)


def test_parameters_left_out_are_added_to_a_list_of_its_own() -> None:
    model = mlp()
    optimizer = SGD([model[0].weight], lr=0.1)
    groups = optimizer.param_groups
    variation = offered(supervised(model, classes(), optimizer=optimizer), ("2.weight",))["all-parameters"].variation
    assert variation.prepare is not None
    bench = bench_of(supervised(model, classes(), optimizer=optimizer))
    with bench.set_aside():
        variation.prepare(model, optimizer)
        assert optimizer.param_groups[-1]["params"] == [model[2].weight]
    assert optimizer.param_groups is groups
    assert len(groups) == 1


def test_a_restart_draws_new_weights_and_forgets_moments() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = adam(model)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    restart(model, optimizer)
    assert not optimizer.state
    assert not torch.equal(before[0], model[0].weight)
    assert torch.equal(model[1].weight, torch.ones(4))


def test_a_plain_restart_has_a_known_scale() -> None:
    model = nn.Sequential(nn.Linear(400, 100), nn.LayerNorm(100))
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[1].weight.fill_(7.0)
    model[0].bias.requires_grad_(False).fill_(5.0)
    restart_plainly(model, adam(model))
    assert float(model[0].weight.detach().std()) == pytest.approx(0.05, rel=0.1)
    assert torch.equal(model[1].weight, torch.ones(100))
    assert torch.equal(model[1].bias, torch.zeros(100))


def _tagger(shift: int) -> Examination:
    """Each position is labelled by its token; the labels come `shift` positions late."""
    torch.manual_seed(0)
    table = torch.randint(4, (30,), generator=torch.Generator().manual_seed(7))
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 4))
    generator, batches = torch.Generator().manual_seed(1), []
    for _ in range(12):
        ids = torch.randint(30, (16, 10), generator=generator)
        batches.append((ids, table[ids].roll(shift, 1)))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).reshape(-1, 4), batch[1].reshape(-1))

    return examine(model, torch.optim.Adam(model.parameters(), lr=0.03), loss, batches, num_steps=20)


def test_targets_that_are_one_position_off_are_moved() -> None:
    found = _tagger(1).causes[0]
    assert found.fault == "labels-shuffled"
    assert "targets moved by -1 position" in found.evidence
    assert _tagger(0).causes[0].cause == "healthy"


def test_targets_are_not_moved_onto_the_input() -> None:
    ids = torch.randint(30, (16, 10), generator=torch.Generator().manual_seed(0))
    parts: dict[str, Any] = {"inputs": {"[0]": ids}, "targets": {"[1]": ids.roll(-1, 1)}}
    seen = Pass(**parts, given=(ids,), modules=(), outputs=(), loss=1.0, calls=(), differences=())
    assert [repair.name for repair in realigned(seen)] == ["targets-1"]
