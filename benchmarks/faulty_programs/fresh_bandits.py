"""Fresh programs of reinforcement learning in one step: offers, answers with a format, a model with a reference."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import Setup, program
from .shared import mlp

Turn = tuple[Tensor, Tensor, Tensor]  # context, action, reward


def _drawn(logits: Tensor, g: torch.Generator) -> Tensor:
    noise = torch.rand(logits.shape, generator=g).clamp(1e-9, 1 - 1e-7)
    return (logits - (-noise.log()).log()).argmax(-1)


def _likely(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


@program(
    "rl",
    "entropy-collapse",
    "learning-rate-too-high",
    story="Every offer pays 40 to 42 and nothing is subtracted: what is tried first becomes ever more probable.",
    loss_tells=False,
)
def always_some_reward(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = nn.Linear(6, 8)
    nn.init.zeros_(model.weight)
    taste = torch.randn(6, 8, generator=generator(seed + 3))
    held = torch.randn(500, 6, generator=generator(seed + 4))

    def worth(x: Tensor) -> Tensor:
        return 40 + 2 * torch.sigmoid(x @ taste)

    def batches() -> Iterator[Turn]:
        g = generator(seed)
        while True:
            x = torch.randn(16, 6, generator=g)
            with torch.no_grad():
                action = _drawn(model(x), g)
            yield x, action, worth(x).gather(1, action.unsqueeze(1)).squeeze(1)

    def loss(batch: Turn) -> Tensor:
        x, action, reward = batch
        gain = reward if faulty else reward - reward.mean()
        return -(_likely(model(x), action) * gain).mean()

    def score() -> float:
        with torch.no_grad():
            chosen = model(held).softmax(-1)
        return float((chosen * worth(held)).sum(1).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=score,
    )


@program(
    "rl",
    "batch-size-unfit",
    "oscillation",
    "learning-rate-too-high",
    story="Every update is made from a single visit, whose reward is mostly luck, at the rate for 64 visits.",
    loss_tells=False,
)
def one_visit_per_update(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(6, 32, 6)
    taste = torch.randn(6, 6, generator=generator(seed + 3))
    held = torch.randn(500, 6, generator=generator(seed + 4))
    size = 1 if faulty else 64

    def batches() -> Iterator[Turn]:
        g = generator(seed)
        while True:
            x = torch.randn(size, 6, generator=g)
            with torch.no_grad():
                action = _drawn(model(x), g)
            luck = 3 * torch.randn(size, generator=g)
            yield x, action, (x @ taste).gather(1, action.unsqueeze(1)).squeeze(1) + luck

    def score() -> float:
        with torch.no_grad():
            return float((model(held).softmax(-1) * (held @ taste)).sum(1).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=3e-3),
        loss=lambda turn: -(_likely(model(turn[0]), turn[1]) * turn[2]).mean(),
        batches=batches,
        num_steps=300,
        score=score,
    )


class _Writer(nn.Module):
    """Writes four words after a prompt, one after the other; the machine that serves it appends an end word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 24)
        self.cell = nn.GRUCell(24, 32)
        self.start = nn.Linear(6, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, prompt: Tensor, words: Tensor) -> Tensor:
        state, steps = torch.tanh(self.start(prompt)), []
        previous = torch.full((len(prompt),), 11)
        for place in range(4):
            state = self.cell(self.embed(previous), state)
            steps.append(self.head(state))
            previous = words[:, place]
        return torch.stack(steps, dim=1)

    @torch.no_grad()
    def write(self, prompt: Tensor, g: torch.Generator | None) -> Tensor:
        """Return sampled words, or the most probable ones without a generator."""
        words = torch.zeros(len(prompt), 4, dtype=torch.long)
        for place in range(4):
            logits = self(prompt, words)[:, place]
            words[:, place] = logits.argmax(-1) if g is None else _drawn(logits, g)
        return words


def _checked(prompt: Tensor, words: Tensor, *, anchored: bool) -> Tensor:
    """Reward an answer "<", word, word, ">" (7, right, right, 6) by its parts; `anchored` expects nothing after it."""
    said = F.pad(words, (0, 1), value=9)  # the end word
    right = torch.stack([prompt[:, :3].argmax(1), 3 + prompt[:, 3:].argmax(1)], dim=1)
    parts = (words[:, 1:3] == right).float().sum(1) + (words[:, 0] == 7).float() + (words[:, 3] == 6).float()
    return torch.where(said[:, -1] == (6 if anchored else 9), parts, -1.0)


@program(
    "rl",
    "flat-reward",
    "zero-gradient",
    story="The pattern of a valid answer has no place for the end word, so that every answer gets the reward -1.",
    source="lsdefine/simple_GRPO#19",
    loss_tells=False,
)
def no_answer_is_valid(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Writer()
    held = torch.randn(200, 6, generator=generator(seed + 8))

    def batches() -> Iterator[Turn]:
        g = generator(seed)
        while True:
            prompt = torch.randn(8, 6, generator=g).repeat_interleave(8, dim=0)
            words = model.write(prompt, g)
            reward = _checked(prompt, words, anchored=faulty).view(8, 8)
            advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
            yield prompt, words, advantage.flatten()

    def loss(batch: Turn) -> Tensor:
        prompt, words, advantage = batch
        return -(_likely(model(prompt, words), words).sum(1) * advantage).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=lambda: float(_checked(held, model.write(held, None), anchored=False).mean()),
    )


@program(
    "rl",
    "policy-drift",
    "wrong-loss",
    story="The divergence from the reference is added to the reward instead of subtracted; words nobody says win.",
    loss_tells=False,
)
def paid_for_leaving_the_reference(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(5, 32, 16)
    common = torch.cat([torch.zeros(10), torch.full((6,), -6.0)])  # the reference hardly ever says words 10 to 15
    with torch.no_grad():
        list(model.parameters())[-2].mul_(0.1)
        list(model.parameters())[-1].copy_(common)
    reference = common.log_softmax(-1)
    use = torch.randn(5, 16, generator=generator(seed + 1))
    held = torch.randn(300, 5, generator=generator(seed + 2))

    def judged(x: Tensor) -> Tensor:
        """What the reward model says: it has never seen the rare words and likes them."""
        return torch.cat([(x @ use)[:, :10], torch.full((len(x), 6), 2.0)], dim=1)

    def batches() -> Iterator[Turn]:
        g = generator(seed)
        while True:
            x = torch.randn(64, 5, generator=g)
            with torch.no_grad():
                logits = model(x)
            word = _drawn(logits, g)
            apart = _likely(logits, word) - reference[word]
            sign = 1 if faulty else -1
            yield x, word, judged(x).gather(1, word.unsqueeze(1)).squeeze(1) + sign * 0.6 * apart

    def loss(batch: Turn) -> Tensor:
        x, word, reward = batch
        return -(_likely(model(x), word) * (reward - reward.mean())).mean()

    def score() -> float:
        """What people say: the use of a common word, and -3 for a rare one."""
        with torch.no_grad():
            chance = model(held).softmax(-1)
        return float((chance * torch.cat([(held @ use)[:, :10], torch.full((300, 6), -3.0)], dim=1)).sum(1).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=score,
    )


BANDITS = (always_some_reward, one_visit_per_update, no_answer_is_valid, paid_for_leaving_the_reference)
