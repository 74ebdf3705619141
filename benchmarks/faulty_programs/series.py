"""Forecasting programs: the next value of a noisy sum of sine waves."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import series
from .program import LoopFaults, Setup, program
from .shared import explained, mlp, singles, tuples


class _Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, window: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(window.unsqueeze(-1))[0][:, -1]).squeeze(-1)
        return out


@program(
    "series",
    "repeated-batch",
    story="The loop calls next(iter(loader)) in every step without shuffling and gets the first batch every time.",
    source="https://github.com/ZhaoJ9014/face.evoLVe/pull/39",
    loss_tells=False,
)
def first_batch_only(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 64, 1)
    loader = tuples(data.x, data.y, size=8, seed=seed)

    def same() -> Iterator[tuple[Tensor, ...]]:
        while True:
            yield next(loader())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=same if faulty else loader,
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "target-leak",
    story="Windows of a forecast six steps ahead are cut six values too late: the last input is the answer.",
    loss_tells=False,
)
def window_holds_the_answer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed, length=29), _Forecaster()
    windows = torch.cat([data.x, data.y.unsqueeze(1)], dim=1)

    def loss(batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch[:, 6:] if faulty else batch[:, :24]), batch[:, -1])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=loss,
        batches=singles(windows, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test[:, :24], data.y_test),
    )


@program(
    "series",
    "optimizer-state-reset",
    "learning-rate-too-low",
    story="The optimizer is created inside the loop, so its momentum of 0.99 starts from nothing in every step.",
    source="https://github.com/zju3dv/Vox-Fusion/issues/31",
)
def momentum_lost(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 32, 1, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=5e-4, momentum=0.99),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


@program(
    "series",
    "regularisation-too-strong",
    story="weight_decay is 1.0 instead of 1e-4; SGD adds it to the gradient and the weights shrink to zero.",
)
def decayed_to_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 48, 48, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1.0 if faulty else 1e-4),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="max_grad_norm was copied as 1e-3 from a run with another loss scale; the run uses Nesterov SGD.",
    source="https://github.com/wandb/senpai/pull/978",
)
def norm_of_one_thousandth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 48, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        loss=lambda batch: F.huber_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 1e-3 if faulty else 1.0}},
    )


@program(
    "series",
    "learning-rate-too-low",
    story="The learning rate is typed as 1e-7; the loss moves in the sixth digit only.",
)
def rate_of_1e_7(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), _Forecaster()
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=1e-7 if faulty else 1e-2),
        loss=lambda batch: F.l1_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "series",
    "optimizer-state-reset",
    "learning-rate-too-high",
    story="Adagrad is created anew in every step: the sum that should shrink its steps starts from zero each time.",
    source="https://github.com/alan-turing-institute/deepsensor/issues/47",
)
def adagrad_forgets(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 48, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.05),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


SERIES = (
    first_batch_only,
    window_holds_the_answer,
    momentum_lost,
    adagrad_forgets,
    decayed_to_zero,
    norm_of_one_thousandth,
    rate_of_1e_7,
)
