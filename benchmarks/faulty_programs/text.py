"""Text classification programs: short reviews and surnames of made-up languages."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import names, sentences
from .program import LoopFaults, Setup, program
from .shared import accuracy, dicts, evaluating, tuples


class _Encoder(nn.Module):
    """A transformer encoder that reads the class off a first token of its own."""

    def __init__(self, mask_inverted: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(72, 32), nn.Parameter(0.1 * torch.randn(17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)
        self.mask_inverted = mask_inverted

    def forward(self, words: Tensor) -> Tensor:
        words = F.pad(words, (1, 0), value=71)
        padding = words == 0
        if self.mask_inverted:
            padding = ~padding
        words = self.blocks(self.embed(words) + self.place, src_key_padding_mask=padding)
        out: Tensor = self.head(words[:, 0])
        return out


@program(
    "text",
    "output-independent-of-input",
    story="The padding mask marks the real words; PyTorch ignores what is marked, so attention reads the padding only.",
    source="https://github.com/facebookresearch/detr/issues/96",
)
def mask_inverted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Encoder(mask_inverted=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch["words"]), batch["label"]),
        batches=dicts({"words": data.x, "label": data.y}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "learning-rate-too-high",
    story="A small transformer is trained with Adam at 0.3, a rate that was meant for SGD.",
    source="https://github.com/guillaumegenthial/sequence_tagging/issues/47",
)
def adam_at_sgd_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Encoder()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.3 if faulty else 2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "schedule-error",
    "learning-rate-too-low",
    story="The warmup is copied from a long run: 40,000 steps of linear warmup in a run of 300 steps.",
    source="https://discuss.pytorch.org/t/bce-loss-stuck-at-0-693-in-the-beginnng-of-training-and-then-started-to-"
    "decrease-why/183958",
)
def warmup_outlasts_run(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    warmup = 40_000 if faulty else 40
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0)),
    )


class _Bag(nn.Module):
    """The mean of the word vectors, two linear layers and, where a program asks for it, log_softmax on some axis."""

    def __init__(
        self, *, vocabulary: int = 72, classes: int = 2, dropout: float = 0.0, axis: int | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(vocabulary, 24, mode="mean", padding_idx=0)
        self.body = nn.Sequential(nn.Dropout(dropout), nn.Linear(24, 32), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(32, classes)
        self.axis = axis

    def forward(self, words: Tensor) -> Tensor:
        words = self.head(self.body(self.embed(words)))
        return words if self.axis is None else F.log_softmax(words, dim=self.axis)


@program(
    "text",
    "softmax-axis",
    "batch-dependence",
    story="log_softmax runs over the batch axis; a single review at prediction time gets log-probability 0 everywhere.",
    source="https://github.com/perone/euclidesdb/issues/2",
)
def softmax_over_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = names(seed), _Bag(vocabulary=27, classes=3, axis=0 if faulty else 1)

    def one_at_a_time() -> float:
        with evaluating(model):
            guesses = torch.stack([model(row.unsqueeze(0)).argmax() for row in data.x_test])
        return float((guesses == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.nll_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=24, seed=seed),
        num_steps=250,
        score=one_at_a_time,
    )


@program(
    "text",
    "regularisation-too-strong",
    story="Dropout is set to 0.97 by someone who reads the argument as the probability to keep a unit.",
)
def dropout_as_keep_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Bag(dropout=0.97 if faulty else 0.03)
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.05),
        loss=lambda batch: F.cross_entropy(model(batch["text"]), batch["target"]),
        batches=dicts({"text": data.x, "target": data.y}, size=40, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "text",
    "missing-zero-grad",
    "learning-rate-too-high",
    story="zero_grad is called once per epoch instead of once per batch, so gradients pile up over 75 batches.",
    source="https://github.com/pytorch/pytorch/issues/47175",
)
def zero_grad_per_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = sentences(seed), _Bag()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=75 if faulty else 1),
    )


class _LetterRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(27, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, letters: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(letters))[0].mean(1))
        return out


@program(
    "text",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="A notebook cell creates the model a second time after the optimizer; the optimizer trains the first one.",
    source="https://github.com/spro/practical-pytorch/issues/9",
)
def model_created_twice(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, first, model = names(seed), _LetterRNN(), _LetterRNN()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam((first if faulty else model).parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


TEXT = (
    mask_inverted,
    adam_at_sgd_rate,
    warmup_outlasts_run,
    softmax_over_batch,
    dropout_as_keep_rate,
    zero_grad_per_epoch,
    model_created_twice,
)
