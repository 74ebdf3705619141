"""Next programs on text: classifiers in the style of Hugging Face, of lecture notes and of a first project."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, generator, names, prose, sentences
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, tuples

WORDS, TOKENS = 71, 27


class _Encoder(nn.Module):
    """A small transformer that reads `input_ids` and answers logits, as the library's classes do."""

    def __init__(self, num_labels: int = 2, hidden_size: int = 32, num_layers: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, hidden_size, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(16, hidden_size))
        layer = nn.TransformerEncoderLayer(hidden_size, 2, 2 * hidden_size, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.layers(self.embeddings(input_ids) + self.positions, src_key_padding_mask=input_ids == 0)
        logits: Tensor = self.classifier(hidden.mean(1))
        return logits


@program(
    "text",
    "learning-rate-too-high",
    "output-independent-of-input",
    "oscillation",
    story="A transformer is tuned with AdamW at 0.03: soon it answers the same for every review.",
    source="graykode/nlp-tutorial#77",
)
def transformer_at_three_hundredths(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(0)
    model = _Encoder()

    def compute_loss(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-2 if faulty else 1e-3),
        loss=compute_loss,
        batches=dicts({"input_ids": data.x, "labels": data.y}, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Pooling(nn.Module):
    """Word vectors weighted by attention; `dim` is the axis the weights add up to one on."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.attention = nn.Linear(24, 1)
        self.out = nn.Linear(24, 2)
        self.dim = dim

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.embedding(words)
        scores = self.attention(torch.tanh(vectors)) * math.sqrt(24)
        weights = F.softmax(scores, dim=self.dim)
        logits: Tensor = self.out((weights * vectors).sum(1))
        return logits


@program(
    "text",
    "softmax-axis",
    "batch-dependence",
    story="Attention takes its softmax over the first axis, so the weights of a word add up to one over the batch.",
    source="PetrochukM/PyTorch-NLP#2",
)
def attention_over_the_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(1)
    net = _Pooling(0 if faulty else 1)

    def score() -> float:
        with evaluating(net):  # one review at a time, as the service answers them
            right = [int(net(x.unsqueeze(0)).argmax()) == int(y) for x, y in zip(data.x_test, data.y_test, strict=True)]
        return sum(right) / len(right)

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=500,
        score=score,
    )


@program(
    "text",
    "constant-inputs",
    "output-independent-of-input",
    story="The vocabulary is in lower case and the reviews are not: every word becomes the one for unknown words.",
)
def every_word_is_unknown(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(2)
    vocabulary = {f"word{i}": i for i in range(2, WORDS)}
    spelled = "Word{}" if faulty else "word{}"

    def encode(rows: Tensor) -> Tensor:
        return torch.tensor([[vocabulary.get(spelled.format(i), 1) for i in row] for row in rows.tolist()])

    x, x_test = encode(data.x), encode(data.x_test)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


class _NameReader(nn.Module):
    """An LSTM over the letters of a surname."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=batch_first)
        self.fc = nn.Linear(32, 3)

    def forward(self, letters: Tensor) -> Tensor:
        out, _ = self.lstm(self.emb(letters))
        logits: Tensor = self.fc(out[:, -1])
        return logits


@program(
    "text",
    "batch-dependence",
    story="The LSTM expects time first and gets the batch first: it walks from one surname to the next.",
    source="HHTseng/video-classification#42",
)
def walks_along_the_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = names(0)
    net = _NameReader(batch_first=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Stack(nn.Module):
    """Dense layers over averaged letters, held in a plain list or in a ModuleList."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, 8)
        self.emb.weight.requires_grad_(False)
        layers = [nn.Linear(80, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        self.hidden = layers if plain else nn.ModuleList(layers)
        self.out = nn.Linear(4, 3)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.emb(letters).flatten(1)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        logits: Tensor = self.out(x)
        return logits


@program(
    "text",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The hidden layers are in a Python list, so parameters() does not know them and nothing trains them.",
    source="pytorch/pytorch#715",
    same_start=False,
)
def layers_in_a_list(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = names(1), _Stack(plain=faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "language",
    "wrong-loss",
    story="NLLLoss gets the next letter's probabilities from a softmax instead of their logarithm.",
    source="mjc92/GetToThePoint#8",
    loss_tells=False,
)
def probabilities_into_nll(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = prose()
    size = len(LETTERS)
    last: nn.Module = nn.Softmax(dim=-1) if faulty else nn.LogSoftmax(dim=-1)
    net = nn.Sequential(nn.Embedding(size, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, size), last)
    criterion = nn.NLLLoss()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: criterion(net(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Initial(nn.Module):
    """A GRU whose classifier reads the last state, or by mistake the first."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 16)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.fc = nn.Linear(24, 2)
        self.wrong = wrong

    def forward(self, words: Tensor) -> Tensor:
        h0 = torch.zeros(1, len(words), 24)
        _, hn = self.gru(self.emb(words), h0)
        logits: Tensor = self.fc(h0[-1] if self.wrong else hn[-1])
        return logits


@program(
    "text",
    "output-independent-of-input",
    "zero-gradient",
    story="The classifier reads h0, the state the GRU began with, instead of the one it returned.",
)
def state_before_reading(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = sentences(3), _Initial(faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


def _reviews(seed: int, size: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    g = generator(seed)
    while True:
        rows = torch.randint(0, len(x), (size,), generator=g)
        yield x[rows], y[rows]


@program(
    "text",
    "regularisation-too-strong",
    "output-independent-of-input",
    story="The squares of all word vectors are added to the loss with a weight of 1, not 0.0001.",
)
def penalty_on_every_word(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(4)
    weight = 1.0 if faulty else 1e-4
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 16), nn.Linear(16, 2))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum((p**2).sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1]) + weight * penalty

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=loss,
        batches=lambda: _reviews(seed, 32, data.x, data.y),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


TEXT = (
    transformer_at_three_hundredths,
    attention_over_the_batch,
    every_word_is_unknown,
    walks_along_the_batch,
    layers_in_a_list,
    probabilities_into_nll,
    state_before_reading,
    penalty_on_every_word,
)
