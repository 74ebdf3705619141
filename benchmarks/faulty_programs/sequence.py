"""Recurrent networks that have to remember something from the start of a sequence."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import recall
from .program import Setup, program
from .shared import accuracy, dicts, tuples


class _Stack(nn.Module):
    """Two LSTM layers, registered in a ModuleList or kept in a Python list."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        layers = [nn.LSTM(4, 24, batch_first=True), nn.LSTM(24, 24, batch_first=True)]
        self.layers = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        out: Tensor = self.head(x[:, -1])
        return out


@program(
    "sequence",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="The LSTM layers are kept in a Python list, so model.parameters() does not contain them.",
    source="https://github.com/ikostrikov/pytorch-meta-optimizer/issues/11",
    same_start=False,
)
def layers_in_a_list(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=8), _Stack(registered=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _GRUClassifier(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 32, batch_first=batch_first), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


@program(
    "sequence",
    "batch-dependence",
    story="The data is (batch, time, features) and the GRU was created without batch_first: it runs over the batch.",
    source="https://github.com/HHTseng/video-classification/issues/42",
)
def batch_taken_for_time(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=12), _GRUClassifier(batch_first=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch["frames"]), batch["label"]),
        batches=dicts({"frames": data.x, "label": data.y}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Bidirectional(nn.Module):
    def __init__(self, viewed: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)
        self.viewed = viewed

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.rnn(x)[1]  # (directions, batch, 16)
        x = hidden.reshape(len(x), 32) if self.viewed else hidden.transpose(0, 1).flatten(1)
        out: Tensor = self.head(x)
        return out


@program(
    "sequence",
    "batch-dependence",
    "labels-shuffled",
    story="The hidden state (directions, batch, size) is viewed as (batch, directions x size): rows of other examples "
    "end up side by side.",
    source="https://github.com/timbmg/Sentence-VAE/issues/15",
)
def hidden_state_viewed(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=10), _Bidirectional(viewed=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _PlainRNN(nn.Module):
    """h = relu(W h + U x), with W a multiple of the identity at the start if `scale` is given."""

    def __init__(self, scale: float | None, truncated: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(32, 32), nn.Linear(4, 32), nn.Linear(32, 4)
        if scale is not None:
            self.inner.weight.data.copy_(scale * torch.eye(32))
        self.truncated = truncated

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 32)
        for step in x.unbind(1):
            hidden = hidden.detach() if self.truncated else hidden
            hidden = torch.relu(self.inner(hidden) + self.outer(step))
        out: Tensor = self.head(hidden)
        return out


@program(
    "sequence",
    "exploding-gradient",
    "non-finite",
    "learning-rate-too-high",
    story="A recurrent network on sequences of 25 steps is trained without gradient clipping; its gradients grow with "
    "the length of the sequence.",
    source="https://github.com/Marcovaldong/lstmp.pytorch/issues/2",
)
def recurrence_unclipped(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=25), _PlainRNN(scale=1.05)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        config={} if faulty else {"training": {"max_grad_norm": 1.0}},
    )


@program(
    "sequence",
    "zero-gradient",
    "vanishing-gradient",
    story="The hidden state is detached at every time step to save memory, so no gradient reaches the first input.",
)
def detached_every_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=10), _PlainRNN(scale=None, truncated=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Gated(nn.Module):
    def __init__(self, forget: float) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 32, batch_first=True), nn.Linear(32, 4)
        nn.init.constant_(self.rnn.get_parameter("bias_ih_l0")[32:64], forget)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[1][0][0])
        return out


@program(
    "sequence",
    "vanishing-gradient",
    "poor-initialisation",
    story="The bias of the forget gate is set to -9 instead of +3: the cell forgets its state within a few steps.",
    source="Jozefowicz, Zaremba and Sutskever, An empirical exploration of recurrent network architectures, 2015",
    same_start=False,
)
def forgetful_cell(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = recall(seed, length=15), _Gated(forget=-9.0 if faulty else 3.0)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


SEQUENCE = (
    layers_in_a_list,
    batch_taken_for_time,
    hidden_state_viewed,
    recurrence_unclipped,
    detached_every_step,
    forgetful_cell,
)
