"""Unseen programs on sequences of words and numbers: taggers, classifiers, language models, a recurrent adder."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LambdaLR

from .data import LETTERS, prose
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, explained, singles, tuples
from .unseen_data import adding, marked, tags, topics


class _Tagger(nn.Module):
    """One causal convolution over embedded words."""

    def __init__(self, num_tags: int, dim: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(41, dim)
        self.conv = nn.Conv1d(dim, dim, 2)
        self.out = nn.Linear(dim, num_tags)

    def forward(self, words: Tensor) -> Tensor:
        x = F.pad(self.words(words).transpose(1, 2), (1, 0))
        out: Tensor = self.out(F.gelu(self.conv(x)).transpose(1, 2))
        return out


@program(
    "text",
    "constant-targets",
    "all-ignored-targets",
    "wrong-loss",
    "suspicious-perfection",
    "output-independent-of-input",
    story="ignore_index is 0, the number of the padding, but 0 is also one of the two tags: only the other one counts.",
    source="https://github.com/nyu-mll/jiant/issues/925",
    loss_tells=False,
)
def tag_zero_is_padding(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tags(seed), _Tagger(2)
    y, y_test = data.y // 2, data.y_test // 2
    ignored = 0 if faulty else -100
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=ignored),
        batches=tuples(data.x, y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, y_test),
    )


class _PackedGRU(nn.Module):
    """Sorts by length to pack the batch; has to undo that at the end."""

    def __init__(self, restore: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(62, 16, padding_idx=0)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, 5)
        self.restore = restore

    def forward(self, words: Tensor) -> Tensor:
        lengths, order = (words > 0).sum(1).sort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words[order]), lengths, batch_first=True)
        out: Tensor = self.out(self.gru(packed)[1][0])
        return out[order.argsort()] if self.restore else out


@program(
    "text",
    "labels-shuffled",
    "batch-dependence",
    story="Sequences are sorted by length to be packed, and the outputs are not put back into the order of the labels.",
    source="https://city.shaform.com/en/2019/01/15/sort-sequences-in-pytorch/",
)
def sorted_and_left_sorted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _PackedGRU(restore=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch["words"]), batch["topic"]),
        batches=dicts({"words": data.x, "topic": data.y}, size=48, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _LetterLSTM(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.forth = nn.LSTM(16, 48, batch_first=True)
        self.back = nn.LSTM(16, 48, batch_first=True)
        self.out = nn.Linear(96, len(LETTERS))
        self.both = both

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embed(letters)
        left = self.forth(x)[0]
        right = self.back(x.flip(1))[0].flip(1) if self.both else torch.zeros_like(left)
        out: Tensor = self.out(torch.cat([left, right], dim=-1))
        return out


@program(
    "text",
    "target-leak",
    "suspicious-perfection",
    story="A letter model reads the window in both directions: the backward half has seen the next letter.",
    source="https://github.com/sherjilozair/char-rnn-tensorflow/pull/64",
    loss_tells=False,
)
def language_model_reads_backwards(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(60), _LetterLSTM(both=faulty)
    windows = torch.cat([data.x, data.y[:, -1:]], dim=1)

    def continued() -> float:
        with evaluating(model):
            ends = [(model(data.x_test[:, :k])[:, -1], data.y_test[:, k - 1]) for k in (12, 24, 36, 48)]
        return -sum(float(F.cross_entropy(scores, letter)) for scores, letter in ends) / 4

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()),
        batches=singles(windows, size=20, seed=seed),
        num_steps=200,
        score=continued,
    )


class _Attention(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(41, dim)
        nn.init.normal_(self.words.weight, std=0.5)
        self.places = nn.Parameter(torch.randn(12, dim))
        self.block = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, 4)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.block(self.words(words) + self.places))
        return out


@program(
    "text",
    "learning-rate-too-low",
    "schedule-error",
    story="The Noam formula gives a learning rate, and LambdaLR multiplies it with the learning rate of the optimizer.",
    source="https://github.com/lhoyer/MIC/issues/60",
)
def noam_times_learning_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tags(seed, count=3000), _Attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if faulty else 1.0, betas=(0.9, 0.98))

    def noam(step: int) -> float:
        return float(32**-0.5 * min((step + 1) ** -0.5, (step + 1) * 100**-1.5))

    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, noam),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _BagOfWords(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(table.embedding_dim, 5)

    def forward(self, words: Tensor) -> Tensor:
        shown = (words > 0).unsqueeze(-1)
        out: Tensor = self.out((self.table(words) * shown).sum(1) / shown.sum(1).sqrt())
        return out


@program(
    "text",
    "constant-inputs",
    "output-independent-of-input",
    story="The text is lower case, the vocabulary is not: every word is looked up as unknown.",
)
def every_word_unknown(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = topics(seed), _BagOfWords(nn.Embedding(62, 16))

    def looked_up(words: Tensor) -> Tensor:
        return words.clamp(max=1) if faulty else words

    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(looked_up(data.x), data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, looked_up(data.x_test), data.y_test),
    )


@program(
    "text",
    "frozen-parameters",
    story="Word vectors are handed over with Embedding.from_pretrained, which freezes them; they are random and small.",
)
def vectors_frozen_by_default(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = topics(seed)
    table = nn.Embedding.from_pretrained(torch.randn(62, 3), freeze=faulty)  # type: ignore[no-untyped-call]
    model = _BagOfWords(table)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Pooling(nn.Module):
    """Weighs the positions by attention and classifies the weighted sum."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed, self.score, self.out = nn.Linear(6, 24), nn.Linear(24, 1), nn.Linear(24, 5)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        out: Tensor = self.out((self.score(x).softmax(self.dim) * x).sum(1))
        return out


@program(
    "text",
    "softmax-axis",
    story="Attention weights of shape (N, T, 1) are normalized over the last axis, so that all of them are 1.",
    source="https://github.com/ctallec/world-models/issues/10",
)
def attends_to_everything(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = marked(seed), _Pooling(-1 if faulty else 1)
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Adder(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(32, 1)
        weights = dict(self.rnn.named_parameters())
        with torch.no_grad():
            weights["weight_hh_l0"].copy_(gain * torch.eye(32))
            weights["weight_ih_l0"].normal_(std=0.1)
            weights["bias_ih_l0"].zero_()
            weights["bias_hh_l0"].zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rnn(x)[0][:, -1]).squeeze(-1)
        return out


@program(
    "text",
    "exploding-gradient",
    "poor-initialisation",
    "learning-rate-too-high",
    "non-finite",
    story="A ReLU recurrence starts from 1.4 times the identity: state and gradient grow 20,000-fold over 30 numbers.",
    source="Pascanu et al., On the difficulty of training recurrent neural networks (2013)",
    same_start=False,
)
def recurrence_of_gain_1_4(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = adding(seed, 30), _Adder(1.4 if faulty else 0.98)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=48, seed=seed),
        num_steps=450,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(41, 16)
        self.cell = nn.LSTMCell(16, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, words: Tensor) -> Tensor:
        h = c = torch.zeros(len(words), 24)
        states = []
        for word in self.words(words).unbind(1):
            h, c = self.cell(word, (h, c))
            states.append(h)
        out: Tensor = self.out(torch.stack(states, dim=1))
        return out


@program(
    "text",
    "schedule-error",
    "learning-rate-too-low",
    story="Cosine decay over the number of epochs, 12, but the scheduler steps with every batch and stays at zero.",
    source="DeepFD (Cao et al., ICSE 2022), improper learning rate",
)
def cosine_over_in_twelve_steps(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tags(seed), _Cell()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    total = 12 if faulty else 250

    def cosine(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(step, total) / total))

    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, cosine),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


TEXT = (
    tag_zero_is_padding,
    sorted_and_left_sorted,
    language_model_reads_backwards,
    noam_times_learning_rate,
    every_word_unknown,
    vectors_frozen_by_default,
    attends_to_everything,
    recurrence_of_gain_1_4,
    cosine_over_in_twelve_steps,
)
