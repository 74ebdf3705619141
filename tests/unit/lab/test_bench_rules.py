"""The rules of others, against values computed by hand."""

import math

import pytest
import torch
from torch import nn

from steadystep.lab.bench.faulty_arms import Ruled, times_zero
from steadystep.lab.bench.rival_rule import Spam, clip_units, measured, one_group_each, shrink_updates
from steadystep.lab.bench.rival_rules import (
    RULES,
    AdaGC,
    AutoClip,
    FixedClip,
    KillLossSpike,
    RuleAlarm,
    Sample,
    SkipStep,
    SpikeDetection,
    ZClip,
)
from steadystep.lab.tasks import TASKS, Task

NAN = math.nan


def norm(value: float, loss: float = 1.0) -> Sample:
    return Sample(loss=loss, norm=value, norms=(value,))


def losses(rule, *values: float) -> list[bool]:
    return [rule.update(norm(1.0, loss)).alarm for loss in values]


def test_the_fixed_clip_scales_to_one() -> None:
    rule = FixedClip()
    assert rule.update(norm(0.9)) == RuleAlarm()
    assert rule.update(norm(4.0)) == RuleAlarm(alarm=True, scale=pytest.approx(0.25, rel=1e-5))
    assert math.isnan(rule.update(norm(NAN)).scale)
    assert rule.update(norm(math.inf)) == RuleAlarm(alarm=True, scale=0.0)


def test_zclip_by_hand() -> None:
    rule = ZClip(warmup_steps=4, max_norm=math.inf)
    for value in (1.0, 1.2, 1.0, 0.8):
        assert rule.update(norm(value)).scale == 1.0
    # mean 1.0, sigma sqrt(0.02) = 0.141421; 1.3 is z = 2.12: not an outlier
    assert not rule.update(norm(1.3)).alarm
    mean, variance = 0.97 * 1.0 + 0.03 * 1.3, 0.97 * 0.02
    variance += 0.03 * (1.3 - mean) ** 2
    sigma = math.sqrt(variance)
    z = (50.0 - mean) / (sigma + 1e-6)
    verdict = rule.update(norm(50.0))
    assert verdict.alarm
    assert verdict.scale * 50.0 == pytest.approx(mean + 2.5 * sigma / (z / 2.5), rel=1e-5)


def test_zclip_is_blind_after_one_nan() -> None:
    rule = ZClip(warmup_steps=2)
    for value in (1.0, 1.1, NAN):
        rule.update(norm(value))
    assert not rule.update(norm(1e9)).alarm


def test_skip_step_is_one_sided_and_leaves_the_present_out_of_its_window() -> None:
    past = [1.0, 2.0] * 32  # mean 1.5, sample deviation 0.50395
    limit = 1.5 + 6 * math.sqrt(sum((x - 1.5) ** 2 for x in past) / 63)
    for value, alarm in ((limit - 0.01, False), (limit + 0.01, True), (-50.0, False)):
        rule = SkipStep()
        assert not any(losses(rule, *past))
        verdict = rule.update(norm(1.0, value))
        assert verdict == (RuleAlarm(alarm=True, scale=0.0) if alarm else RuleAlarm())
    short = SkipStep()
    assert not any(losses(short, *past[:62]))
    assert losses(short, 100.0) == [False]  # the 63rd: not yet
    assert losses(short, 1e6) == [True]


def test_one_nan_blocks_skip_step_until_it_has_left_the_window() -> None:
    rule = SkipStep(window=8)
    said = losses(rule, *[1.0, 1.1] * 4, NAN, *[1.0, 1.1] * 6)
    assert said[:8] == [False] * 8
    assert said[8:17] == [True] * 9  # itself and the eight that have it in their window
    assert said[17:] == [False] * 4


def test_kill_loss_spike_needs_a_full_window_and_five_in_a_row() -> None:
    rule = KillLossSpike(num_steps=100)
    assert not any(losses(rule, *[1.0] * 100))
    assert losses(rule, 2.1, 2.1, 2.1, 2.1, 2.1) == [False] * 4 + [True]
    assert losses(KillLossSpike(num_steps=100), *[11.0] * 101)[-1]  # half of the window above the cap
    assert not any(losses(KillLossSpike(num_steps=100), *[1.0] * 100, *[NAN] * 50))


def test_spike_detection_by_hand() -> None:
    assert losses(SpikeDetection(), *[1.0] * 10, 2.9) == [False] * 11
    assert losses(SpikeDetection(), *[1.0] * 10, 3.0) == [False] * 10 + [True]
    assert losses(SpikeDetection(), NAN) == [True]
    assert losses(SpikeDetection(), *[-0.1, 0.1] * 4, 0.5)[-1]  # a loss around zero: an alarm for nothing
    assert SpikeDetection().update(norm(1.0, NAN)).stop


def test_adagc_by_hand() -> None:
    rule = AdaGC(warmup_steps=2)
    assert rule.update(Sample(loss=1.0, norm=0.5, norms=(0.3, 0.4))).scale == 1.0
    assert rule.update(Sample(loss=1.0, norm=0.5, norms=(0.4, 0.3))).scale == 1.0  # levels: 0.3 and 0.3
    verdict = rule.update(Sample(loss=1.0, norm=3.0, norms=(0.3, 3.0)))
    assert verdict.alarm
    assert verdict.scales == (1.0, pytest.approx(1.05 * 0.3 / 3.0))
    level = 0.98 * 0.3 + 0.02 * 1.05 * 0.3
    assert rule.update(Sample(loss=1.0, norm=3.0, norms=(0.3, 3.0))).scales[1] == pytest.approx(1.05 * level / 3.0)


def test_autoclip_by_hand() -> None:
    rule = AutoClip(percentile=50)
    assert not rule.update(norm(1.0)).alarm
    assert rule.update(norm(2.0)).scale == pytest.approx(0.75, rel=1e-5)  # median of 1 and 2, over 2
    assert rule.update(norm(9.0)).scale == pytest.approx(2.0 / 9.0, rel=1e-5)
    rule.update(norm(NAN))
    assert math.isnan(rule.update(norm(1.0)).scale)


@pytest.fixture
def two_rows() -> tuple[nn.Linear, torch.optim.Adam]:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, betas=(0.9, 0.99))
    layer.weight.grad = torch.full((2, 2), 0.1)
    optimizer.step()  # v = 0.01 * 0.01 = 1e-4
    layer.weight.data = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    layer.weight.grad = torch.tensor([[0.0, 1.0], [0.0, 0.001]])
    return layer, optimizer


def test_what_is_measured_inside_tensors(two_rows) -> None:
    unit, coordinate, surprise = measured(*two_rows)
    assert unit == pytest.approx(1.0 / 5.0)
    assert coordinate == pytest.approx(1.0 / 1e-4, rel=1e-4)
    v = [(0.99 * 1e-4 + 0.01 * g * g) / (1 - 0.99**2) for g in (0.0, 1.0, 0.0, 0.001)]
    expected = math.sqrt(sum(g * g / x for g, x in zip((0.0, 1.0, 0.0, 0.001), v, strict=True)) / 4)
    assert surprise == pytest.approx(expected, rel=1e-4)


def test_agc_by_hand(two_rows) -> None:
    layer, optimizer = two_rows
    clip_units(layer, optimizer, 0)
    assert layer.weight.grad.flatten().tolist() == pytest.approx([0.0, 0.05, 0.0, 0.001])


def test_spam_by_hand(two_rows) -> None:
    layer, optimizer = two_rows
    Spam()(layer, optimizer, 0)
    assert layer.weight.grad.flatten().tolist() == pytest.approx([0.0, math.sqrt(5000 * 1e-4), 0.0, 0.001], rel=1e-4)
    Spam()(layer, optimizer, 500)
    assert not optimizer.state[layer.weight]["exp_avg_sq"].any()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 150)


def test_stable_adamw_divides_each_rate_by_the_surprise(two_rows) -> None:
    layer, optimizer = two_rows
    one_group_each(optimizer)
    layer.weight.grad.fill_(5.0)
    surprise = 5.0 / math.sqrt((0.99 * 1e-4 + 0.01 * 25.0) / (1 - 0.99**2))
    assert surprise > 1
    shrink_updates(layer, optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / surprise, rel=1e-4)


def small_task() -> Task:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        batch=lambda: torch.ones(2, 3),
        loss=lambda x: model(x).square().mean(),
        held_out=lambda: 0.0,
    )


@pytest.mark.parametrize("name", [info.name for info in RULES.values() if info.does != "log"])
def test_every_rule_trains(name: str) -> None:
    task = small_task()
    ruled = Ruled(task, RULES[name], num_steps=100)
    ticks = [ruled.step(task.loss, task.batch()) for _ in range(30)]
    assert ruled.updates == 30
    assert ticks[-1].loss < ticks[0].loss
    assert {group["lr"] for group in ruled.optimizer.param_groups} == {0.1}  # whatever was changed is put back


def test_an_update_times_zero_moves_nothing_but_lets_nan_through() -> None:
    task = small_task()
    ruled = Ruled(task, RULES["SkipStep"], num_steps=100)
    for _ in range(3):
        ruled.step(task.loss, task.batch())
    before = task.model.weight.detach().clone()
    times_zero(ruled)
    assert torch.equal(task.model.weight, before)
    task.model.weight.grad[0, 1] = NAN
    times_zero(ruled)
    assert task.model.weight.isnan().tolist() == [[False, True, False]]
    assert task.optimizer.state[task.model.weight]["exp_avg_sq"].isnan().any()


def test_rules_for_adam_say_so() -> None:
    sgd = {name for name, info in TASKS.items() if "betas" not in info.make(0).optimizer.defaults}
    assert "clusters" in sgd
    assert {name for name, info in RULES.items() if info.only_adam} == {"SPAM", "StableAdamW"}
