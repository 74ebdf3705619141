"""Fresh programs on text: classification, and questions answered by attention."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator, sentences
from .fresh_data import topics
from .program import Setup, program
from .shared import accuracy, dicts, tuples


class _Lookup(nn.Module):
    """Answers a question about a list of pairs by attention: which value stands beside this key?"""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 48)
        self.value = nn.Embedding(8, 48)
        self.query, self.key = nn.Linear(48, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 8)
        self.scale = scale

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        q, k = self.query(self.embed(batch["question"])), self.key(self.embed(batch["keys"]))
        weight = ((k @ q.transpose(1, 2)).squeeze(-1) * self.scale).softmax(-1)
        answer: Tensor = self.head((weight.unsqueeze(-1) * self.value(batch["values"])).sum(1))
        return answer


def _questions(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Lists of ten keys with a value each, and one of the keys; the answer is its value. 1,200 and 400 rows."""
    g = generator(seed)
    keys = torch.stack([torch.randperm(24, generator=g)[:10] for _ in range(1600)])
    values = torch.randint(0, 8, (1600, 10), generator=g)
    which = torch.randint(0, 10, (1600, 1), generator=g)
    rows = {"keys": keys, "values": values, "question": keys.gather(1, which), "y": values.gather(1, which)[:, 0]}
    return {name: t[:1200] for name, t in rows.items()}, {name: t[1200:] for name, t in rows.items()}


@program(
    "text",
    "saturation",
    "vanishing-gradient",
    story="The scale is already 1 over the root of the width, and the attention scores are divided by it.",
    source="esceptico/perceiver-io#9",
)
def divided_by_the_scale(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Lookup(48**0.5 if faulty else 48**-0.5)
    rows, held = _questions(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=4e-3),
        loss=lambda batch: F.cross_entropy(model(batch), batch["y"]),
        batches=dicts(rows, size=64, seed=seed),
        num_steps=220,
        score=lambda: accuracy(model, held, held["y"]),
    )


class _Reader(nn.Module):
    """A transformer layer over words and their average."""

    def __init__(self, *, pads_too: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(71, 32)
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 2)
        self.pads_too = pads_too

    def forward(self, ids: Tensor) -> Tensor:
        x, pad = self.embed(ids), ids == 0
        both = pad.unsqueeze(1) | pad.unsqueeze(2) if self.pads_too else pad.unsqueeze(1).expand(-1, ids.shape[1], -1)
        mixed = self.attend(x, x, x, attn_mask=both.repeat_interleave(4, dim=0))[0]
        kept = (~pad).unsqueeze(-1)
        logits: Tensor = self.head((self.norm(mixed) * kept).sum(1) / kept.sum(1))
        return logits


@program(
    "text",
    "non-finite",
    story="Padded words are masked as queries as well: their rows of attention are all -inf, and softmax gives NaN.",
    source="pytorch/pytorch#41508",
)
def padding_attends_to_nothing(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Reader(pads_too=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Answer(nn.Module):
    """Reads pairs and a question as one sequence and answers at its last position."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.value = nn.Embedding(24, 48), nn.Embedding(9, 48)
        self.attend = nn.MultiheadAttention(48, 2, batch_first=batch_first)
        self.head = nn.Linear(48, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        keys = torch.cat([batch["keys"], batch["question"]], dim=1)
        values = F.pad(batch["values"], (0, 1), value=8)
        x = self.embed(keys) + self.value(values)
        mixed = self.attend(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(mixed[:, -1])
        return logits


@program(
    "text",
    "batch-dependence",
    story="MultiheadAttention gets (batch, words, width) and takes the first axis for time: questions ask each other.",
    source="dhimasryan/MOSA-Net-Cross-Domain#10",
)
def questions_attend_to_each_other(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Answer(batch_first=not faulty)
    rows, held = _questions(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=4e-3),
        loss=lambda batch: F.cross_entropy(model(batch), batch["y"]),
        batches=dicts(rows, size=64, seed=seed),
        num_steps=350,
        score=lambda: accuracy(model, held, held["y"]),
    )


class _Bag(nn.Module):
    """An average of word vectors and some layers."""

    def __init__(self, width: int = 24, *, rewrap: bool = False, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        self.rewrap = rewrap

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mean(1)
        x = torch.tensor(x.tolist()) if self.rewrap else x
        for layer in self.layers:
            x = x + layer(x).relu()
        logits: Tensor = self.head(x)
        return logits


@program(
    "text",
    "learning-rate-too-low",
    "frozen-parameters",
    story="Each layer below the head gets a hundredth of the rate above it, down to the embedding: 0.01 ** depth.",
)
def a_hundredth_per_layer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _Bag(4, depth=3)
    decay = 0.01 if faulty else 0.9
    stages: list[nn.Module] = [model.head, *reversed(model.layers), model.embed]
    groups: list[dict[str, Any]] = [
        {"params": list(stage.parameters()), "lr": 1e-2 * decay**depth} for depth, stage in enumerate(stages)
    ]
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(groups, weight_decay=0.0),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="model.embed.parameters() is counted before it is chained with the others, and a generator runs only once.",
    source="pytorch/pytorch#47594",
)
def generator_already_consumed(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _Bag(3, depth=1)
    vectors = model.embed.parameters()
    assert sum(p.numel() for p in (vectors if faulty else model.embed.parameters())) > 0  # counts them
    rest = itertools.chain(vectors, model.layers.parameters(), model.head.parameters())
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(rest, lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "zero-gradient",
    "frozen-parameters",
    story="The averaged vectors are put into a new tensor with torch.tensor(x.tolist()); no gradient comes back.",
)
def wrapped_in_a_new_tensor(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _Bag(3, rewrap=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "unshuffled-data",
    story="The notes are sorted by topic and read in that order: at the end only the last topic is remembered.",
    loss_tells=False,
)
def sorted_by_topic(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed, count=3200), _Bag(24)
    order = data.y.argsort(stable=True)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x[order], data.y[order], size=12, seed=seed, shuffle=not faulty),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


TEXT = (
    divided_by_the_scale,
    padding_attends_to_nothing,
    questions_attend_to_each_other,
    a_hundredth_per_layer,
    generator_already_consumed,
    wrapped_in_a_new_tensor,
    sorted_by_topic,
)
