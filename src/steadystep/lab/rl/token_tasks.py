"""Generated tasks over tokens with a verifiable reward, and policies small enough for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

EOS = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTask:
    """Prompts, and what a response to them is worth. A response is filled up with EOS after its first one."""

    name: str
    vocabulary: int
    max_len: int
    prompts: Callable[[int, torch.Generator], Tensor]
    answers: Callable[[Tensor], Tensor]
    """The best response to each prompt."""
    score: Callable[[Tensor, Tensor], Tensor]
    """True reward of (responses, answers), from 0 to 1."""
    grade: Callable[[Tensor, Tensor], Tensor]
    """Held-out grade of (responses, answers): exactly right or not, where an answer is right or wrong."""
    exploit: Callable[[Tensor], Tensor]
    """What a faulty reward pays for instead, from 0 to 1 per response."""
    ends: bool = True
    """Whether EOS ends a response."""


def _exactly(responses: Tensor, answers: Tensor) -> Tensor:
    return (responses == answers).all(1).float()


def _share(responses: Tensor, answers: Tensor) -> Tensor:
    """Share of right positions up to and including the EOS of the answer."""
    counted = torch.cat([torch.ones_like(answers[:, :1]), (answers[:, :-1] != EOS).long()], 1).float()
    return ((responses == answers) * counted).sum(1) / counted.sum(1)


def _sums(prompts: Tensor) -> Tensor:
    """Digits 0 to 9 are the tokens 1 to 10, prompts go up to 5 + 5; the answer has two digits and an EOS."""
    total = (prompts - 1).sum(1)
    digits = torch.stack([total // 10 + 1, total % 10 + 1], 1)
    return functional.pad(digits, (0, 4))


def _sorted(prompts: Tensor) -> Tensor:
    return functional.pad(prompts.sort(1).values, (0, 2))


def _copied(prompts: Tensor) -> Tensor:
    return functional.pad(prompts, (0, 2))


_WORTH = torch.rand(8, 8, generator=torch.Generator().manual_seed(5)).square()
"""Of a token after another one, for the bandit."""


def _best_path() -> tuple[float, Tensor]:
    worth, paths = _WORTH[0], [[token] for token in range(8)]
    for _ in range(4):
        total = worth[:, None] + _WORTH
        worth, before = total.max(0)
        paths = [[*paths[int(b)], token] for token, b in enumerate(before)]
    return float(worth.max()), torch.tensor(paths[int(worth.argmax())])


_MOST, _PATH = _best_path()


def _pays(responses: Tensor, _: Tensor) -> Tensor:
    before = functional.pad(responses[:, :-1], (1, 0))
    return _WORTH[before, responses].sum(1) / _MOST


def _digits(low: int, high: int, length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, rng: torch.randint(low, high, (count, length), generator=rng)


TASKS = {
    task.name: task
    for task in (
        TokenTask(
            name="sum",
            vocabulary=11,
            max_len=6,
            prompts=_digits(1, 7, 2),
            answers=_sums,
            score=_exactly,
            grade=_exactly,
            exploit=lambda r: (r[:, 1] == 1).float(),
        ),
        TokenTask(
            name="sort",
            vocabulary=6,
            max_len=5,
            prompts=_digits(1, 5, 3),
            answers=_sorted,
            score=_share,
            grade=_exactly,
            exploit=lambda r: ((r[:, 1:4] == r[:, :3]) & (r[:, :3] != EOS)).float().mean(1),
        ),
        TokenTask(
            name="copy",
            vocabulary=6,
            max_len=5,
            prompts=_digits(1, 5, 3),
            answers=_copied,
            score=_share,
            grade=_exactly,
            exploit=lambda r: (r == 3).float().mean(1),
        ),
        TokenTask(
            name="bandit",
            vocabulary=8,
            max_len=5,
            prompts=lambda count, rng: torch.zeros(count, 1, dtype=torch.long),
            answers=lambda prompts: _PATH.expand(len(prompts), -1),
            score=_pays,
            grade=_pays,
            exploit=lambda r: (r == 3).float().mean(1),
            ends=False,
        ),
    )
}


class GRUPolicy(nn.Module):
    """One recurrent layer; with a value head for PPO."""

    def __init__(self, task: TokenTask, *, width: int = 48, critic: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocabulary + 1, width)  # the last one begins a response
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, task.vocabulary)
        self.value = nn.Linear(width, 1) if critic else None

    def features(self, tokens: Tensor) -> Tensor:
        """[batch, time] to [batch, time, width]."""
        out: Tensor = self.recurrent(self.tokens(tokens))[0]
        return out

    def extend(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the features after further tokens, and the state to go on from."""
        out, state = self.recurrent(self.tokens(tokens), state)
        return out[:, -1], state


class GPTPolicy(nn.Module):
    """Causal attention and MLP blocks before their norms (pre-LN); with a value head for PPO."""

    def __init__(self, task: TokenTask, *, width: int = 32, num_layers: int = 2, critic: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocabulary + 1, width)
        self.positions = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, task.vocabulary)
        self.value = nn.Linear(width, 1) if critic else None

    def features(self, tokens: Tensor) -> Tensor:
        """[batch, time] to [batch, time, width]."""
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        out: Tensor = self.blocks(x, mask=mask, is_causal=True)
        return out

    def extend(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the features after further tokens, and the state to go on from: all tokens so far."""
        state = tokens if state is None else torch.cat([state, tokens], 1)
        return self.features(state)[:, -1], state


Policy = GRUPolicy | GPTPolicy
POLICIES: dict[str, type[GRUPolicy] | type[GPTPolicy]] = {"gru": GRUPolicy, "gpt": GPTPolicy}
