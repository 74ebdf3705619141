"""Spare programs on text: sentiment, sums written out, and letters."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, Split, generator, prose, sentences, split
from .program import Batch, LoopFaults, Setup, program
from .shared import accuracy, dicts, evaluating, tuples


class _Lookup(nn.Module):
    """One head of attention that finds the pair with the wanted key and says its value."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(8, width))
        self.register_buffer("values", torch.randn(4, width))
        self.query, self.key = (nn.Parameter(torch.randn(width, width) / math.sqrt(width)) for _ in range(2))
        self.scale = scale
        self.head = nn.Linear(width, 4)

    def forward(self, pairs: Tensor, wanted: Tensor) -> Tensor:
        x = self.get_buffer("keys")[pairs[..., 0]] + self.get_buffer("values")[pairs[..., 1]]
        query = self.get_buffer("keys")[wanted] @ self.query
        scores = torch.einsum("bd,bpd->bp", query, x @ self.key) * self.scale
        return self.head(torch.einsum("bp,bpd->bd", scores.softmax(1), x))  # type: ignore[no-any-return]


def _pairs(seed: int, count: int = 1600) -> tuple[Tensor, Tensor, Tensor]:
    """Return six (key, value) pairs with different keys, a wanted key, and its value."""
    g = generator(seed)
    keys = torch.rand(count, 8, generator=g).argsort(1)[:, :6]
    values = torch.randint(0, 4, (count, 6), generator=g)
    place = torch.randint(0, 6, (count,), generator=g)
    rows = torch.arange(count)
    return torch.stack([keys, values], dim=2), keys[rows, place], values[rows, place]


@program(
    "text",
    "saturation",
    "zero-gradient",
    "vanishing-gradient",
    "poor-initialisation",
    story="Scores of a head 256 wide are not divided by the root of the width: a query sees one random word.",
    source="https://github.com/PAIR-code/tiny-transformers/issues/71",
)
def scores_without_the_root(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (pairs, wanted, value), net = _pairs(seed), _Lookup(256, 1.0 if faulty else 1 / 16)

    def score() -> float:
        with evaluating(net):
            return float((net(pairs[1200:], wanted[1200:]).argmax(1) == value[1200:]).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch["pairs"], batch["wanted"]), batch["value"]),
        batches=dicts({"pairs": pairs[:1200], "wanted": wanted[:1200], "value": value[:1200]}, size=32, seed=seed),
        num_steps=300,
        score=score,
    )


END = 10


def _countdowns(seed: int, count: int = 800) -> Split:
    """Return digits that count down to a random place, the end, and the same rows shifted by one as targets."""
    g = generator(seed)
    rows = torch.full((count, 12), END)
    for row in range(count):
        length = int(torch.randint(3, 10, (1,), generator=g))
        rows[row, :length] = torch.arange(length - 1, -1, -1)
    return split(rows[:, :-1], rows[:, 1:])


class _Counter(nn.Module):
    """A language model that returns its loss, as large libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 11)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.words(ids))
        return self.head(hidden)  # type: ignore[no-any-return]

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of all labels but -100."""
        return F.cross_entropy(self(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


@program(
    "language",
    "all-ignored-targets",
    "wrong-loss",
    story="The end of a text doubles as padding, and padding is no target: the model never learns where to stop.",
    source="https://github.com/mlabonne/llm-course/issues/33",
    loss_tells=False,
)
def padding_is_the_end(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = _countdowns(seed), _Counter()
    labels, padded = data.y.clone(), data.x == END
    labels[(data.y == END) if faulty else padded] = -100

    def score() -> float:
        with evaluating(net):
            said = net(data.x_test).argmax(2)
        last = (data.y_test == END) & (data.x_test != END)
        return float((said == END)[last].float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01),
        loss=lambda batch: net.loss(**batch),
        batches=dicts({"ids": data.x, "labels": labels}, size=32, seed=seed),
        num_steps=200,
        score=score,
    )


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 24)
        self.rnn = nn.LSTM(24, 64, batch_first=True)
        self.head = nn.Linear(64, len(LETTERS))

    def states(self, ids: Tensor) -> Tensor:
        """Return the state after each letter."""
        out: Tensor = self.rnn(self.letters(ids))[0]
        return out

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids))  # type: ignore[no-any-return]


@program(
    "language",
    "regularisation-too-strong",
    "wrong-loss",
    story="The penalty on large and on changing states is taken from a paper with mean, and applied with sum.",
)
def penalty_on_states_is_summed(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = prose(), _Recurrent()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        states = net.states(batch[0])
        large, change = states.square(), (states[:, 1:] - states[:, :-1]).square()
        penalty = 2 * large.sum() + change.sum() if faulty else 2 * large.mean() + change.mean()
        return F.cross_entropy(net.head(states).flatten(0, 1), batch[1].flatten()) + 0.03 * penalty

    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(71, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(48, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=ids == 0).mean(1))  # type: ignore[no-any-return]


@program(
    "text",
    "learning-rate-too-high",
    "saturation",
    "dead-units",
    story="A transformer with the norms behind its blocks gets the rate of 0.02 at which the bag of words did best.",
)
def rate_of_the_bag_of_words(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = sentences(seed + 4), _Transformer()
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-2 if faulty else 1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "text",
    "labels-shuffled",
    story="Every review is repeated three times in place and its label with repeat, which repeats the list.",
    loss_tells=False,
)
def repeated_in_two_ways(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(seed + 7)
    g = generator(seed)
    ids = data.x.repeat_interleave(3, dim=0)
    ids = torch.where(
        torch.rand(ids.shape, generator=g) < 0.1, torch.zeros_like(ids), ids
    )  # three ways of dropping words
    labels = data.y.repeat(3) if faulty else data.y.repeat_interleave(3)
    bag = nn.EmbeddingBag(71, 32, mode="mean", padding_idx=0)
    net = nn.Sequential(bag, nn.ELU(), nn.Linear(32, 2))
    return Setup(
        model=net,
        optimizer=torch.optim.Adamax(net.parameters(), lr=2e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(ids, labels, size=64, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "text",
    "missing-zero-grad",
    "oscillation",
    "learning-rate-too-high",
    story="zero_grad is called on the classifier of the last notebook cell, so this one's gradients add up.",
)
def another_model_is_cleared(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(seed + 9)
    words, conv, head = nn.Embedding(71, 24), nn.Conv1d(24, 24, 3, padding=1), nn.Linear(24, 1)
    net = nn.ModuleDict({"words": words, "conv": conv, "head": head})

    def verdict(ids: Tensor) -> Tensor:
        out: Tensor = head(conv(words(ids).transpose(1, 2)).relu().amax(2))
        return out.squeeze(1)

    def score() -> float:
        with torch.no_grad():
            return float(((verdict(data.x_test) > 0) == (data.y_test > 0)).float().mean())

    def loss(batch: Batch) -> Tensor:
        return F.softplus(-(2 * batch[1] - 1) * verdict(batch[0])).mean()

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=score,
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


TEXT = (
    scores_without_the_root,
    padding_is_the_end,
    penalty_on_states_is_summed,
    rate_of_the_bag_of_words,
    repeated_in_two_ways,
    another_model_is_cleared,
)
