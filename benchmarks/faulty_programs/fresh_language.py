"""Fresh programs on language: letters, hidden words, translation."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, generator, prose
from .fresh_data import topics, translations
from .program import LoopFaults, Setup, program
from .shared import evaluating, tuples


class _Attention(nn.Module):
    """Causal self-attention with one head, written by hand."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weight = (q @ k.transpose(1, 2) * self.scale).masked_fill(future, -1e9).softmax(-1)
        mixed: Tensor = self.out(weight @ v)
        return mixed


class _Letters(nn.Module):
    """A small language model whose output layer is its embedding."""

    def __init__(self, width: int, scale: float, deviation: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.place = nn.Parameter(0.02 * torch.randn(24, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend = _Attention(width, scale)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        nn.init.normal_(self.embed.weight, std=deviation)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        x = x + self.attend(self.norms[0](x))
        x = x + self.mix(self.norms[1](x))
        return F.linear(self.norms[2](x), self.embed.weight)


def _perplexity(model: nn.Module) -> float:
    data = prose()
    with evaluating(model):
        return -min(20.0, float(F.cross_entropy(model(data.x_test[:200]).flatten(0, 1), data.y_test[:200].flatten())))


@program(
    "language",
    "poor-initialisation",
    "saturation",
    story="The embedding is also the output layer and is drawn with a deviation of 1: the first loss is near 60.",
    source="huggingface/transformers#26441",
    same_start=False,
)
def output_layer_of_deviation_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Letters(64, 64**-0.5, 1.0 if faulty else 0.02)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=lambda: _perplexity(model),
    )


class _Masked(nn.Module):
    """Guesses hidden words from the words around them; returns loss and logits, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(62, 32)
        self.encoder = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.decoder = nn.Linear(64, 62)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.decoder(self.encoder(self.embed(ids))[0])
        if labels is None:
            return {"logits": logits}
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": total / (labels != -100).sum().clamp(min=1), "logits": logits}


@program(
    "language",
    "all-ignored-targets",
    "zero-gradient",
    "suspicious-perfection",
    story="The number of words to hide, int(0.15) * length, is zero: every label is -100.",
    loss_tells=False,
)
def no_word_is_hidden(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _Masked()
    number = int(0.15) * 12 if faulty else round(0.15 * 12)

    def hidden(ids: Tensor, g: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        spots = torch.rand(ids.shape, generator=g).argsort(1) < count
        return ids.masked_fill(spots, 61), ids.masked_fill(~spots, -100)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed + 7)
        for (ids,) in tuples(data.x, size=32, seed=seed)():
            yield hidden(ids, g, number)

    def score() -> float:
        ids, labels = hidden(data.x_test, generator(1), 2)
        with evaluating(model):
            logits = model(ids)["logits"]
        return -float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=lambda batch: model(batch[0], labels=batch[1])["loss"],
        batches=batches,
        num_steps=300,
        score=score,
    )


class _Translator(nn.Module):
    """A recurrent encoder and decoder with attention over the source."""

    def __init__(self, *, forget: bool = False) -> None:
        super().__init__()
        self.forget = forget
        self.source, self.target = nn.Embedding(14, 40), nn.Embedding(14, 40)
        self.encoder, self.decoder = nn.GRU(40, 40, batch_first=True), nn.GRU(40, 40, batch_first=True)
        self.head = nn.Linear(80, 14)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, last = self.encoder(self.source(x))
        if self.forget:
            states, last = torch.zeros_like(states), torch.zeros_like(last)
        steps, _ = self.decoder(self.target(y), last)
        weight = (steps @ states.transpose(1, 2)).softmax(-1)
        logits: Tensor = self.head(torch.cat([steps, weight @ states], dim=-1))
        return logits


def _words_right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with evaluating(model):
        right = model(x, y[:, :-1]).argmax(-1) == y[:, 1:]
    return float(right[y[:, 1:] != 0].float().mean())


@program(
    "translation",
    "output-independent-of-input",
    story="The decoder starts from a hidden state of its own making, and never sees the encoded sentence.",
)
def decoder_starts_from_zeros(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = translations(seed), _Translator(forget=faulty)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: criterion(model(batch[0], batch[1][:, :-1]).flatten(0, 1), batch[1][:, 1:].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: _words_right(model, data.x_test, data.y_test),
    )


@program(
    "language",
    "missing-zero-grad",
    "exploding-gradient",
    "learning-rate-too-high",
    story="Gradients are zeroed every 16 steps, to accumulate them, but the optimizer is called at every step.",
    source="lucidrains/reformer-pytorch#97",
)
def steps_while_accumulating(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Letters(48, 48**-0.5, 0.02)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=lambda: _perplexity(model),
        loop=LoopFaults(zero_grad_every=16 if faulty else 1),
    )


LANGUAGE = (
    output_layer_of_deviation_one,
    no_word_is_hidden,
    decoder_starts_from_zeros,
    steps_while_accumulating,
)
