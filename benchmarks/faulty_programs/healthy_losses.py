"""Healthy programs whose losses or data look strange: nothing is wrong with them, and they learn."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .contrastive import info_nce, nearest_mean, views
from .data import digits, friedman, generator, sentences, split
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, explained, mlp, singles, tuples


@program("vision", story="Raw pixel values from 0 to 255 go in as they are; batch normalization takes care of them.")
def healthy_raw_pixels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), mlp(64, 64, 10))
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(255 * data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, 255 * data.x_test, data.y_test),
    )


@program("vision", story="Biases start at -0.7, so most ReLU units are zero for most images; the rest are enough.")
def healthy_sparse_relu(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 256, 256, 10)
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features == 256:
            nn.init.kaiming_normal_(layer.weight)
            nn.init.constant_(layer.bias, -0.7)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1), data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


@program("vision", story="One image in thirty is a zero: the loss starts low and most batches have few positives.")
def healthy_rare_class(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 32, 1)
    kept = (data.y != 0) | (torch.arange(len(data.y)) % 3 == 0)
    x, y = data.x[kept].flatten(1), (data.y[kept] == 0).float()

    def balanced() -> float:
        with evaluating(model):
            found, wanted = model(data.x_test.flatten(1)).squeeze(1) > 0, data.y_test == 0
        return float((found[wanted].float().mean() + (~found[~wanted]).float().mean()) / 2)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x, y, size=32, seed=seed),
        num_steps=350,
        score=balanced,
    )


class _Bag(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(vocabulary, 16, mode="mean", padding_idx=0), nn.Linear(16, 2)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(words))
        return out


@program("text", story="Label smoothing of 0.6 keeps the loss above 0.6 although every review is classified.")
def healthy_label_smoothing(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Bag(72)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch["words"]), batch["label"], label_smoothing=0.6),
        batches=dicts({"words": data.x, "label": data.y}, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("text", story="A vocabulary of 20,000 of which 70 words occur, and reviews padded to 128 words.")
def healthy_mostly_padding(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Bag(20_000)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(F.pad(data.x, (0, 112)), data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("tabular", story="Squared errors are summed over the batch and counted in another unit: losses of 10,000.")
def healthy_huge_sum(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 64, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2e-6, momentum=0.9),
        loss=lambda batch: 100 * F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="sum"),
        batches=tuples(data.x, 3 * data.y, size=150, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, 3 * data.y_test),
    )


@program("tabular", story="Targets are about 0.001, so the squared error starts at 1e-6 and still falls tenfold.")
def healthy_tiny_loss(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 32, 1)
    for parameter in model[-1].parameters():
        parameter.data.mul_(1e-3)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, 1e-3 * data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, 1e-3 * data.y_test),
    )


@program(
    "tabular",
    story="Three quarters of the target's variance is noise; the loss falls by a fifth and stays there.",
    loss_tells=False,
)
def healthy_irreducible_noise(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    clean, model = friedman(seed, count=2400), mlp(8, 24, 1)
    y = clean.y + 1.7 * torch.randn(len(clean.y), generator=generator(seed))
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(clean.x, y, size=64, seed=seed),
        num_steps=250,
        score=lambda: explained(model, clean.x_test, clean.y_test),
    )


class _MeanAndSpread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 48, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)[:, 0]
        return out


@program("tabular", story="A Gaussian likelihood with a learned variance: the loss goes below zero and keeps falling.")
def healthy_negative_likelihood(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), _MeanAndSpread()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, spread = model.net(batch[0]).unbind(1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(spread) + 1e-4)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular", story="The label is the parity of three of twelve bits: a long plateau at 0.69, then a sudden drop."
)
def healthy_plateau_then_drop(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    bits = torch.randint(0, 2, (4000, 12), generator=generator(seed)).float() * 2 - 1
    data, model = split(bits, (bits[:, :3].prod(1) > 0).long()), mlp(12, 96, 2)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=500,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("contrastive", story="256 pairs per batch at a high temperature: the loss starts at ln 256 and hardly moves.")
def healthy_log_of_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(64, 64, 16)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: info_nce(model(batch[0]), model(batch[1]), temperature=0.7),
        batches=lambda: views(seed, size=256),
        num_steps=200,
        score=lambda: nearest_mean(model),
    )


@program("autoencoder", story="The target is the input, and the network can copy it: the loss goes to nearly zero.")
def healthy_copy(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 128, 64)
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch), batch),
        batches=singles(x, size=64, seed=seed),
        num_steps=300,
        score=lambda: -math.sqrt(1 - explained(model, x_test, x_test)),
    )


HEALTHY_LOSSES = (
    healthy_raw_pixels,
    healthy_sparse_relu,
    healthy_rare_class,
    healthy_label_smoothing,
    healthy_mostly_padding,
    healthy_huge_sum,
    healthy_tiny_loss,
    healthy_irreducible_noise,
    healthy_negative_likelihood,
    healthy_plateau_then_drop,
    healthy_log_of_batch,
    healthy_copy,
)
