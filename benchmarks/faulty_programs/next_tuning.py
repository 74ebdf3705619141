"""Next programs that tune what was trained before, or that tune language models in the style of a library's trainer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits, generator, names, split, table
from .program import Setup, program
from .shared import accuracy, mlp, tuples

PROMPT, ANSWER, VOCABULARY = 10, 4, 24


def questions(seed: int, count: int = 1000) -> Split:
    """Return prompts of ten tokens, and their answers: the four first tokens backwards."""
    g = generator(seed)
    prompt = torch.randint(2, VOCABULARY, (count, PROMPT), generator=g)
    return split(prompt, prompt[:, :ANSWER].flip(1))


class _Chat(nn.Module):
    """A GRU that reads the prompt and the answer so far."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.h = nn.GRU(32, 64, batch_first=True)
        self.lm_head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.h(self.wte(input_ids))
        logits: Tensor = self.lm_head(hidden)
        return logits


@program(
    "finetuning",
    "all-ignored-targets",
    "zero-gradient",
    "suspicious-perfection",
    story="max_length cuts the answers off, and the prompt is masked with -100: no label is left, and the loss is 0.",
    source="huggingface/trl#6668",
    loss_tells=False,
)
def answers_cut_off(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = questions(seed), _Chat()
    max_length = PROMPT if faulty else PROMPT + ANSWER

    def collate() -> Iterator[dict[str, Tensor]]:
        for prompt, answer in tuples(data.x, data.y, size=32, seed=seed)():
            ids = torch.cat([prompt, answer], 1)
            labels = ids.clone()
            labels[:, :PROMPT] = -100
            yield {"input_ids": ids[:, :max_length], "labels": labels[:, :max_length]}

    def compute_loss(batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)

    def score() -> float:
        ids = torch.cat([data.x_test, data.y_test], 1)
        with torch.no_grad():
            guess = model(ids[:, :-1])[:, PROMPT - 1 :].argmax(-1)
        return float((guess == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=compute_loss,
        batches=collate,
        num_steps=250,
        score=score,
    )


def trained_backbone() -> nn.Sequential:
    """Return layers that already tell the digits 0 to 4 from each other."""
    torch.manual_seed(0)
    data = digits()
    rows = data.y < 5
    x, y = data.x[rows].flatten(1), data.y[rows]
    body, head = mlp(64, 48, 24), nn.Linear(24, 5)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for a, b in (pair for pair, _ in zip(tuples(x, y, size=32, seed=0)(), range(80), strict=False)):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return body


def later_digits() -> Split:
    """Return the digits 5 to 9, flat, with labels from 0."""
    data = digits()
    a, b = data.y >= 5, data.y_test >= 5
    return Split(data.x[a].flatten(1), data.y[a] - 5, data.x_test[b].flatten(1), data.y_test[b] - 5)


@program(
    "finetuning",
    "precision",
    "learning-rate-too-low",
    story="A model is tuned in bfloat16, weights included, at a rate whose updates are all rounded away.",
    source="pytorch/ao#1124",
    same_start=False,
)
def updates_rounded_away(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = later_digits()
    dtype = torch.bfloat16 if faulty else torch.float32
    body = trained_backbone()
    torch.manual_seed(seed)
    model = nn.Sequential(body, nn.LayerNorm(24), nn.Linear(24, 5)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.sign())  # a pretrained model has few weights close to zero
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0),
        loss=lambda batch: F.cross_entropy(model(batch[0].to(dtype)).float(), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=500,
        score=lambda: accuracy(model, data.x_test.to(dtype), data.y_test),
    )


@program(
    "finetuning",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="Backbone and head are frozen one after the other; what is left to learn is the norm between them.",
    source="open-mmlab/mmdetection#3667",
)
def head_frozen_as_well(faulty: bool, seed: int) -> Setup:
    data = later_digits()
    body = trained_backbone()
    torch.manual_seed(seed)
    model = nn.ModuleDict({"backbone": body, "neck": nn.LayerNorm(24), "bbox_head": nn.Linear(24, 5)})
    whole = nn.Sequential(model["backbone"], nn.ReLU(), model["neck"], model["bbox_head"])
    for v in model["backbone"].parameters():
        v.requires_grad = False
    for v in model["bbox_head"].parameters():
        v.requires_grad = not faulty
    return Setup(
        model=whole,
        optimizer=torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(whole(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=lambda: accuracy(whole, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "poor-initialisation",
    "saturation",
    "vanishing-gradient",
    story="Weights are drawn with a deviation of 3, where a tutorial said random_normal, and the tanh layers are full.",
    source="DeepFD (Cao et al., ICSE 2022): improper weight initialization",
    same_start=False,
)
def weights_three_wide(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    x, x_test = data.x[:, :6], data.x_test[:, :6]
    net = mlp(6, 24, 24, 24, 3, act=nn.Tanh)
    for module in net:
        if isinstance(module, nn.Linear) and faulty:
            nn.init.normal_(module.weight, 0.0, 3.0)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=16, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, x_test, data.y_test),
    )


class _TwoWays(nn.Module):
    """A bidirectional GRU whose two last states are joined; `view` joins states of different rows."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(27, 16)
        self.gru = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 3)
        self.view = view

    def forward(self, letters: Tensor) -> Tensor:
        _, hidden = self.gru(self.emb(letters))
        joined = hidden.reshape(len(letters), -1) if self.view else hidden.transpose(0, 1).flatten(1)
        logits: Tensor = self.out(joined)
        return logits


@program(
    "text",
    "batch-dependence",
    "labels-shuffled",
    story="The last states of both directions, (2, batch, 16), are put into rows with view instead of transpose.",
    source="timbmg/Sentence-VAE#15",
)
def states_of_other_rows(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = names(3), _TwoWays(faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "text",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="The clip norm of a detector, 0.01, was copied into the config of a recurrent classifier with SGD.",
    source="facebookresearch/Mask2Former#148",
)
def clip_norm_of_a_detector(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = names(4), _TwoWays(False)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 0.01 if faulty else 1.0}},
    )


TUNING = (
    answers_cut_off,
    updates_rounded_away,
    head_frozen_as_well,
    weights_three_wide,
    states_of_other_rows,
    clip_norm_of_a_detector,
)
