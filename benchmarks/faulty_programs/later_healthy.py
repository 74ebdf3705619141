"""Healthy oddities of the later set: runs that look strange and learn."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, digits, friedman, generator, names, prose, ratings, series, table, waves
from .program import Setup, program, train
from .shared import accuracy, binary_accuracy, evaluating, explained, mlp, tuples


@program("tabular", story="A loss summed over the batch and the columns of a regression: it starts in the hundreds.")
def summed_over_everything(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=5e-5, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="sum"),
        batches=tuples(data.x, data.y, size=256, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program("vision", story="Half of the labels are wrong at random: the loss stays high, and the test accuracy is good.")
def half_of_the_labels_wrong(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    guess = torch.randint(0, 10, data.y.shape)
    y = torch.where(torch.rand(len(data.y)) < 0.5, guess, data.y)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, y, size=64, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("vision", story="Two images per batch with group normalization: the loss jumps from step to step and falls.")
def two_images_with_group_norm(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    )
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=2, seed=seed),
        num_steps=600,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("vision", story="A rate of 4 with plain SGD: the layers are normalized, and the scores small by design.")
def rate_of_four(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=4.0),
        loss=lambda batch: F.cross_entropy(model(batch[0]) * 0.1, batch[1], label_smoothing=0.1),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("finetuning", story="Only the biases of a trained network are trained on, for brighter pictures.")
def biases_only(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def job(light: float, steps: int) -> Setup:
        trained = [p for p in model.parameters() if p.requires_grad]
        return Setup(
            model=model,
            optimizer=torch.optim.Adam(trained, lr=5e-3 if len(trained) == 6 else 3e-2),
            loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
            batches=tuples(data.x + light, data.y, size=32, seed=seed),
            num_steps=steps,
            score=lambda: accuracy(model, data.x_test + light, data.y_test),
        )

    train(job(0.0, 150))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    return job(1.0, 300)


@program("series", story="The negative log-likelihood of a normal distribution falls through zero and below.")
def likelihood_below_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 32, 2)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, spread = model(batch[0]).unbind(1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(spread) + 1e-4)

    def score() -> float:
        with evaluating(model):
            error = (model(data.x_test)[:, 0] - data.y_test).pow(2).mean() / data.y_test.var()
        return 1 - float(error)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=score,
    )


@program("series", story="A sawtooth schedule: the rate goes from high to low eight times, and the loss with it.")
def rate_of_a_sawtooth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=50, eta_min=1e-4),
    )


@program("recommender", story="Most columns of the input are zero in every batch: a bag of users and items.")
def nearly_all_columns_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = ratings(seed)

    def bag(pairs: Tensor) -> Tensor:
        return torch.cat([F.one_hot(pairs[:, 0], 60), F.one_hot(pairs[:, 1], 50), torch.zeros(len(pairs), 90)], 1)

    model = mlp(200, 64, 64, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(bag(batch[0])).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: binary_accuracy(model, bag(data.x_test), data.y_test),
    )


@program("tabular", story="One example in twenty is positive, and its errors weigh nineteen times as much.")
def one_in_twenty(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("breast_cancer")
    keep = (data.y == 1) | (torch.cumsum(data.y == 0, 0) <= 14)  # malignant ones are the rare class
    x, rare = data.x[keep], (data.y[keep] == 0).float()
    model = mlp(30, 16, 1)
    weight = torch.tensor(19.0)

    def score() -> float:
        with evaluating(model):
            found = model(data.x_test).squeeze(1) > 0
        ill = data.y_test == 0
        return float(0.5 * found[ill].float().mean() + 0.5 * (~found[~ill]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1], pos_weight=weight),
        batches=tuples(x, rare, size=64, seed=seed),
        num_steps=200,
        score=score,
    )


@program("text", story="The embedding of the letters is fixed noise, and half of every layer is dropped.")
def fixed_embedding_and_heavy_dropout(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = names(seed)
    embedding = nn.Embedding(27, 32, padding_idx=0)
    embedding.weight.requires_grad_(False)
    model = nn.Sequential(
        embedding, nn.Flatten(), nn.Dropout(0.5), nn.Linear(320, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 3)
    )
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(len(LETTERS), 48)
        self.rnn = nn.GRU(48, 48, batch_first=True)
        self.head = nn.Linear(48, len(LETTERS), bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.emb(x))
        logits: Tensor = self.head(h)
        return logits


@program(
    "language", story="Embedding and output share one weight, most targets are ignored, and gradients are clipped."
)
def one_letter_in_four_counts(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Tied()
    y = data.y.masked_fill(torch.rand(data.y.shape, generator=generator(seed)) < 0.75, -100)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
        batches=tuples(data.x, y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 0.25}},
    )


@program("audio", story="A warm-up over half of the run, then a fall to zero: hardly anything happens at either end.")
def warm_up_over_half_of_the_run(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = waves(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 128)), nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(480, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - abs(min(i, 300) - 150) / 150),
    )


HEALTHY = (
    summed_over_everything,
    half_of_the_labels_wrong,
    two_images_with_group_norm,
    rate_of_four,
    biases_only,
    likelihood_below_zero,
    rate_of_a_sawtooth,
    nearly_all_columns_zero,
    one_in_twenty,
    fixed_embedding_and_heavy_dropout,
    one_letter_in_four_counts,
    warm_up_over_half_of_the_run,
)
