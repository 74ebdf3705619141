"""More of the next healthy oddities: adversaries, rewards, sequences, pairs."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, generator, prose, ratings, recall, sentences
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, mlp, tuples


@program(
    "rl",
    story="The reward is noisy and the policy gradient has no baseline: the loss says nothing, and it learns.",
    loss_tells=False,
)
def noisy_reward_without_baseline(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(4, 24, 3)

    def rollouts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = generator(seed)
        while True:
            state = torch.randn(128, 4, generator=g)
            with torch.no_grad():
                action = policy(state).softmax(-1).multinomial(1).squeeze(1)
            reward = (action == state[:, :3].argmax(1)).float() + 0.5 * torch.randn(128, generator=g)
            yield state, action, reward

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        state, action, reward = batch
        chosen = policy(state).log_softmax(-1).gather(1, action.unsqueeze(1)).squeeze(1)
        value: Tensor = -(chosen * reward).mean()
        return value

    def score() -> float:
        state = torch.randn(1000, 4, generator=generator(9))
        return accuracy(policy, state, state[:, :3].argmax(1))

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        loss=loss,
        batches=rollouts,
        num_steps=350,
        score=score,
    )


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 24)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.wte_out = nn.Linear(48, 24)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.rnn(self.wte(ids))
        logits: Tensor = F.linear(self.wte_out(out), self.wte.weight)  # input and output share their letters
        return logits


@program("language", story="Input and output embedding are one matrix, and the gradient norm is clipped in every step.")
def tied_and_always_clipped(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = prose(), _Reader()

    def score() -> float:
        with evaluating(model):
            return float((model(data.x_test[:150]).argmax(-1) == data.y_test[:150]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=250,
        score=score,
        config={"training": {"max_grad_norm": 0.2}},
    )


@program("text", story="Three of four labels are -100, as in a tagger that is paid for a few tokens only.")
def most_labels_are_ignored(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = sentences(7)
    tags = (data.x > 40).long() + (data.x > 55).long()
    ignored = torch.rand(tags.shape, generator=generator(seed)) < 0.75
    tags = tags.masked_fill(ignored, -100)
    net = nn.Sequential(nn.Embedding(71, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))

    def score() -> float:
        true = (data.x_test > 40).long() + (data.x_test > 55).long()
        return accuracy(net, data.x_test, true)

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100),
        batches=tuples(data.x, tags, size=32, seed=seed),
        num_steps=200,
        score=score,
    )


@program("recommender", story="The table has room for 3,000 users and 60 are there: most rows never get a gradient.")
def room_for_more_users(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = ratings(seed + 3)
    users, items = nn.Embedding(3000, 8), nn.Embedding(50, 8)
    model = nn.ModuleDict({"user": users, "item": items})

    def logit(pairs: Tensor) -> Tensor:
        match: Tensor = (users(pairs[:, 0] * 50) * items(pairs[:, 1])).sum(1)
        return match

    def score() -> float:
        with torch.no_grad():
            return float(((logit(data.x_test) > 0) == (data.y_test > 0.5)).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(logit(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=350,
        score=score,
    )


@program("tabular", story="A quantile is learned, so most answers are above the target on purpose.")
def seventh_decile(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = friedman(seed + 80), mlp(8, 32, 1)

    def pinball(batch: tuple[Tensor, Tensor]) -> Tensor:
        error = batch[1] - net(batch[0]).squeeze(1)
        return torch.maximum(0.7 * error, -0.3 * error).mean()

    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=0.03),
        loss=pinball,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=350,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


@program(
    "sequence", story="Batches are made by length, as bucketing does it: in some of them most of the input is padding."
)
def batches_by_length(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = recall(seed + 4, 8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def buckets() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            length = int(torch.randint(1, 9, (1,), generator=g))
            rows = torch.randint(0, len(data.x), (32,), generator=g)
            x = data.x[rows].clone()
            x[:, length:] = 0
            yield x, data.y[rows]

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=buckets,
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "vision", story="Training goes on in evaluation mode on purpose: the batch norms of a backbone keep their averages."
)
def batch_norms_keep_their_averages(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    with torch.no_grad():
        for _ in range(30):
            net(data.x[:256])
    net[1].eval()
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular", story="The optimizer starts anew every 100 steps, as a run does that was stopped and taken up again."
)
def taken_up_again(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 90)
    y, y_test = (data.y > 0).float(), (data.y_test > 0).float()
    net = mlp(8, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.softplus((1 - 2 * batch[1]) * net(batch[0]).squeeze(1)).mean(),
        batches=tuples(data.x, y, size=64, seed=seed),
        num_steps=400,
        score=lambda: binary_accuracy(net, data.x_test, y_test),
        loop=LoopFaults(reset_optimizer_every=100),
    )


HEALTHY_MORE = (
    noisy_reward_without_baseline,
    tied_and_always_clipped,
    most_labels_are_ignored,
    room_for_more_users,
    seventh_decile,
    batches_by_length,
    batch_norms_keep_their_averages,
    taken_up_again,
)
