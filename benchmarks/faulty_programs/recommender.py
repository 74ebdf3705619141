"""Recommenders: which user likes which item."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import ratings
from .program import Setup, program
from .shared import binary_accuracy, dicts, tuples


class _Factors(nn.Module):
    """The product of a user's and an item's vector."""

    def __init__(self, sigmoid: bool = False) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(60, 8), nn.Embedding(50, 8)
        for table in (self.user, self.item):
            table.weight.data.mul_(0.3)
        self.sigmoid = sigmoid

    def forward(self, pairs: Tensor) -> Tensor:
        pairs = (self.user(pairs[:, 0]) * self.item(pairs[:, 1])).sum(-1)
        return torch.sigmoid(pairs) if self.sigmoid else pairs


@program(
    "recommender",
    "wrong-loss",
    "saturation",
    story="Scores go through a sigmoid before BCEWithLogitsLoss: no pair can be rated below one half.",
    source="https://github.com/yudi-mars/daisyRec/pull/15",
)
def sigmoid_before_logits_loss(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _Factors(sigmoid=faulty)
    criterion = nn.BCEWithLogitsLoss()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: criterion(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


class _TwoTowers(nn.Module):
    """Embeddings kept in an nn.ModuleDict or in a plain dict, and a network that compares them."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        tables = {"user": nn.Embedding(60, 8), "item": nn.Embedding(50, 8)}
        self.tables = nn.ModuleDict(tables) if registered else tables
        self.head = nn.Linear(8, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = self.head(self.tables["user"](pairs[:, 0]) * self.tables["item"](pairs[:, 1])).squeeze(1)
        return out


@program(
    "recommender",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="The embedding tables are kept in a Python dict, so the optimizer never sees them.",
    source="https://github.com/xiaxin1998/COTREC/issues/15",
    same_start=False,
)
def tables_in_a_dict(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _TwoTowers(registered=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch["pairs"]), batch["liked"]),
        batches=dicts({"pairs": data.x, "liked": data.y}, size=128, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "recommender",
    "constant-inputs",
    "output-independent-of-input",
    story="User and item numbers are hashed into buckets of 1,000 although there are 60 users: all share bucket 0.",
)
def one_bucket_for_all(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _Factors()
    bucket = 1000 if faulty else 1
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0] // bucket), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test // bucket, data.y_test),
    )


@program(
    "recommender",
    "batch-size-unfit",
    story="The batch size is cut from 256 to 1 after a memory error; learning rate and number of steps stay the same.",
)
def one_pair_per_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _Factors()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=1 if faulty else 256, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


RECOMMENDER = (
    sigmoid_before_logits_loss,
    tables_in_a_dict,
    one_bucket_for_all,
    one_pair_per_batch,
)
