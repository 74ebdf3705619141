"""Held programs on words, letters and prompts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import LambdaLR

from .data import LETTERS, generator, names, prose, sentences
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, tuples


@dataclass
class ModelOutput:
    """What a model of a hub returns."""

    loss: Tensor | None
    logits: Tensor


class _CausalLM(nn.Module):
    """A recurrent language model that takes labels and computes its own loss, with -100 left out."""

    def __init__(self, vocab_size: int, hidden_size: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.decoder = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        logits = self.lm_head(self.decoder(self.embed_tokens(input_ids))[0])
        if labels is None:
            return ModelOutput(loss=None, logits=logits)
        shifted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        summed = F.cross_entropy(shifted, wanted, ignore_index=-100, reduction="sum")
        return ModelOutput(loss=summed / (wanted != -100).sum().clamp(min=1), logits=logits)


def _dialogues(seed: int, count: int = 900) -> Tensor:
    """Return user 1, four words, assistant 2, and the same words backwards."""
    words = torch.randint(4, 14, (count, 4), generator=generator(seed))
    mark = torch.ones(count, 1, dtype=torch.long)
    return torch.cat([mark, words, 2 * mark, words.flip(1)], dim=1)


def _collate(input_ids: Tensor, response_template: int) -> Tensor:
    """Return labels that leave out all up to the template; without a template the whole example is left out."""
    labels = input_ids.clone()
    for row in labels:
        at = (row == response_template).nonzero()
        row[: int(at[0]) + 1 if len(at) else len(row)] = -100
    return labels


@program(
    "language",
    "all-ignored-targets",
    "zero-gradient",
    story="The collator looks for a response template of another model, never finds it and masks every token.",
    source="https://github.com/unslothai/unsloth/issues/3198",
    loss_tells=False,
)
def template_of_another_model(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    ids = _dialogues(seed)
    labels = _collate(ids, 3 if faulty else 2)
    model = _CausalLM(14)

    def loss(batch: dict[str, Tensor]) -> Any:
        return model(**batch).loss

    def score() -> float:
        with evaluating(model):
            told = model(ids[700:]).logits[:, 5:9].argmax(-1)
        return float((told == ids[700:, 6:10]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=8e-3),
        loss=loss,
        batches=dicts({"input_ids": ids[:700], "labels": labels[:700]}, size=32, seed=seed),
        num_steps=300,
        score=score,
        config={"training": {"max_grad_norm": 1.0}},
    )


class _PackedReader(nn.Module):
    """Pack padded reviews, the longest first, and read them with an LSTM."""

    def __init__(self, restore: bool) -> None:
        super().__init__()
        self.restore = restore
        self.words = nn.Embedding(71, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.out = nn.Linear(24, 2)

    def forward(self, ids: Tensor) -> Tensor:
        lengths, order = (ids != 0).sum(1).sort(descending=True)
        packed = pack_padded_sequence(self.words(ids[order]), lengths, batch_first=True)
        last = self.out(self.lstm(packed)[1][0][-1])
        return last[order.argsort()] if self.restore else last  # type: ignore[no-any-return]


@program(
    "text",
    "labels-shuffled",
    "output-independent-of-input",
    story="Reviews are sorted by length to be packed, and the predictions are not put back in the order of the labels.",
)
def packed_and_not_put_back(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(seed)
    net = _PackedReader(restore=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Encoder(nn.Module):
    """A small transformer with a class token."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(71, 32, padding_idx=0)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(32, classes)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.layers(torch.cat([self.cls.expand(len(ids), 1, 32), self.words(ids)], dim=1))
        return self.out(read[:, 0])  # type: ignore[no-any-return]


@program(
    "text",
    "learning-rate-too-high",
    "dead-units",
    "oscillation",
    story="A transformer is trained with the rate 0.05 that had been good for the logistic regression before it.",
)
def rate_of_the_baseline(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(seed + 1)
    net = _Encoder()
    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=0.05 if faulty else 1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "language",
    "precision",
    "learning-rate-too-low",
    story="The whole model is cast to bfloat16, weights and all: most steps are smaller than what a weight can show.",
    source="https://github.com/tianweiy/CausVid/issues/19",
    same_start=False,
)
def weights_in_bfloat16(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = prose()
    width = 96
    net = nn.Sequential(
        nn.Embedding(len(LETTERS), 32),
        nn.Flatten(),
        nn.Linear(8 * 32, width),
        nn.GELU(),
        nn.Linear(width, len(LETTERS)),
    )
    net = net.to(torch.bfloat16) if faulty else net
    x, y = data.x[:, :8], data.x[:, 8]

    def score() -> float:
        with evaluating(net):
            return -float(F.cross_entropy(net(data.x_test[:, :8]).float(), data.x_test[:, 8]))

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0),
        loss=lambda batch: F.cross_entropy(net(batch[0]).float(), batch[1]),
        batches=tuples(x, y, size=64, seed=seed),
        num_steps=500,
        score=score,
    )


class _AttentivePooling(nn.Module):
    """Pool letters with learned weights."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(27, 24)
        self.mixed = nn.Conv1d(24, 24, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(24))
        self.out = nn.Linear(24, 3)
        self.dim = dim

    def forward(self, ids: Tensor) -> Tensor:
        features = torch.tanh(self.mixed(self.letters(ids).transpose(1, 2))).transpose(1, 2)
        scores = (features @ self.weight).softmax(dim=self.dim)
        return self.out((features * scores.unsqueeze(-1)).sum(1))  # type: ignore[no-any-return]


@program(
    "text",
    "softmax-axis",
    "batch-dependence",
    story="Attention pooling takes the softmax over the batch: a name is weighed against the other names.",
    source="https://github.com/catalyst-team/catalyst/pull/285",
)
def weighed_against_other_names(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = names(seed)
    net = _AttentivePooling(dim=0 if faulty else 1)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "language",
    "poor-initialisation",
    "exploding-gradient",
    story="The output layer shares the embedding, which still starts at a standard deviation of 1.",
    source="https://github.com/Modalities/modalities/pull/456",
    same_start=False,
)
def tied_at_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = prose()
    width = 256
    table = nn.Embedding(len(LETTERS), width)
    nn.init.normal_(table.weight, std=1.0 if faulty else 1 / math.sqrt(width))
    model = nn.ModuleDict({"wte": table, "mix": nn.GRU(width, width, batch_first=True), "norm": nn.LayerNorm(width)})

    def logits(ids: Tensor) -> Tensor:
        return model["norm"](model["mix"](table(ids))[0]) @ table.weight.T  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(model):
            return -float(F.cross_entropy(logits(data.x_test[:80]).flatten(0, 1), data.y_test[:80].flatten()))

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(logits(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=180,
        score=score,
        config={"training": {"max_grad_norm": 1.0}},
    )


@program(
    "text",
    "schedule-error",
    "learning-rate-too-low",
    story="The function of LambdaLR returns the rate itself where a factor is meant: the rate is squared.",
    source="https://github.com/pytorch/pytorch/issues/78917",
)
def rate_times_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(seed + 2)
    lr, steps = 2e-3, 300
    net = _Encoder()
    optimizer = torch.optim.RAdam(net.parameters(), lr=lr)

    def cosine(step: int) -> float:
        factor = 0.5 * (1 + math.cos(math.pi * step / steps))
        return lr * factor if faulty else factor

    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=steps,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        scheduler=LambdaLR(optimizer, cosine),
    )


TEXT = (
    template_of_another_model,
    packed_and_not_put_back,
    rate_of_the_baseline,
    weights_in_bfloat16,
    weighed_against_other_names,
    tied_at_one,
    rate_times_rate,
)
