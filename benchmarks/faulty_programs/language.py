"""Letter-level language models on docstrings of the standard library."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, prose
from .program import Setup, program
from .shared import dicts, evaluating, singles, tuples

SIZE = len(LETTERS)


class _Transformer(nn.Module):
    def __init__(self, causal: bool = True, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(SIZE, width), nn.Embedding(24, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, SIZE)
        self.causal = causal

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1) if self.causal else torch.zeros(length, length)
        letters = self.embed(letters) + self.place(torch.arange(length))
        out: Tensor = self.head(self.blocks(letters, mask=mask))
        return out


class _Recurrent(nn.Module):
    """An LSTM that takes (batch, time) and returns (batch, time, letters), or (time, batch, letters) if told to."""

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(SIZE, 24), nn.LSTM(24, 64), nn.Linear(64, SIZE)
        self.time_first = time_first

    def forward(self, letters: Tensor) -> Tensor:
        letters = self.head(self.rnn(self.embed(letters.T))[0])
        return letters if self.time_first else letters.transpose(0, 1)


def next_letter(model: nn.Module, *, time_first: bool = False) -> float:
    """Return how often the letter after a prefix is guessed, when the model sees nothing but the prefix."""
    data, right = prose(), 0.0
    x, y = data.x_test[:400], data.y_test[:400]
    with evaluating(model):
        for length in (8, 12, 16):
            out = model(x[:, :length])
            last = out[-1] if time_first else out[:, -1]
            right += float((last.argmax(-1) == y[:, length - 1]).float().mean()) / 3
    return right


@program(
    "language",
    "target-leak",
    story="The decoder has no causal mask: every position sees the letter it has to predict.",
    source="https://github.com/alex-matton/causal-transformer-decoder/issues/1",
    loss_tells=False,
)
def no_causal_mask(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Transformer(causal=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=4e-3),
        loss=lambda batch: F.cross_entropy(model(batch["input"]).flatten(0, 1), batch["labels"].flatten()),
        batches=dicts({"input": data.x, "labels": data.y}, size=32, seed=seed),
        num_steps=300,
        score=lambda: next_letter(model),
    )


@program(
    "language",
    "target-leak",
    story="Labels are the inputs themselves: the shift by one was left to the model, which does not do it.",
    loss_tells=False,
)
def labels_not_shifted(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent()
    windows = torch.cat([data.x, data.y[:, -1:]], dim=1)

    def loss(batch: Tensor) -> Tensor:
        labels = batch[:, :-1] if faulty else batch[:, 1:]
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels.flatten())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=loss,
        batches=singles(windows, size=32, seed=seed),
        num_steps=250,
        score=lambda: next_letter(model),
    )


@program(
    "language",
    "all-ignored-targets",
    "zero-gradient",
    story="The marker after which the labels count is never found, so the collator sets every label to -100.",
    source="https://github.com/huggingface/trl/issues/1191",
    loss_tells=False,
)
def every_label_ignored(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent()
    prompt = data.y.shape[1] if faulty else 4
    labels = torch.where(torch.arange(data.y.shape[1]) < prompt, -100, data.y)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        wanted = batch["labels"].flatten()
        total = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), wanted, ignore_index=-100, reduction="sum")
        return total / (wanted != -100).sum().clamp(min=1)

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01),
        loss=loss,
        batches=dicts({"input_ids": data.x, "labels": labels}, size=32, seed=seed),
        num_steps=250,
        score=lambda: next_letter(model),
    )


@program(
    "language",
    "schedule-error",
    "learning-rate-too-low",
    story="The schedule divides integers: step // total is 0 for the whole run, and so is the learning rate.",
    source="https://github.com/EricFillion/happy-transformer/issues/129",
)
def rate_is_always_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def warmup(step: int) -> float:
        return min((step + 1) // 1000 if faulty else (step + 1) / 50, 1)

    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: next_letter(model),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, warmup),
    )


@program(
    "language",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="The gradient norm is clipped to 1e-4 with plain SGD, a thousandth of the norm of a healthy gradient.",
)
def clipped_to_nothing(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: next_letter(model),
        config={"training": {"max_grad_norm": 1e-4 if faulty else 0.25}},
    )


@program(
    "language",
    "precision",
    "non-finite",
    story="The whole model is float16 and Adam keeps its default eps of 1e-8, which is zero in float16.",
    source="https://github.com/afiaka87/glide-finetune/issues/5",
    same_start=False,
)
def adam_in_float16(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent()
    model = model.half() if faulty else model
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=150,
        score=lambda: next_letter(model),
        config={"training": {"mixed_precision": "no"}},
    )


@program(
    "language",
    "labels-shuffled",
    "batch-dependence",
    story="Outputs are (time, batch, letters) and targets (batch, time); both are flattened and compared.",
    source="https://github.com/yunjey/pytorch-tutorial/issues/89",
)
def flattened_in_two_orders(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Recurrent(time_first=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]).reshape(-1, SIZE), batch[1].reshape(-1)),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: next_letter(model, time_first=faulty),
    )


LANGUAGE = (
    no_causal_mask,
    labels_not_shifted,
    every_label_ignored,
    rate_is_always_zero,
    clipped_to_nothing,
    adam_in_float16,
    flattened_in_two_orders,
)
