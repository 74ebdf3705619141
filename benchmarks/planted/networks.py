"""Four small networks to plant faults in."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """Without an epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divides by the root mean square."""
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Attention(nn.Module):
    """Written out, so that the softmax is its own operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.masked = False

    def forward(self, x: Tensor) -> Tensor:
        """Single head; `masked` hides everything from everybody."""
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        if self.masked:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), -torch.inf)
        mixed: Tensor = self.out(scores.softmax(-1) @ v)
        return mixed


class Block(nn.Module):
    """Attention and MLP around a residual stream."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attn = norm(width), Attention(width)
        self.norm2 = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Both branches, the second multiplied by `gain`."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.gain * self.mlp(self.norm2(x))
        return out


class Act(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Calls it."""
        return self.function(x)


class Transformer(nn.Module):
    """Three blocks over 16 tokens."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, *, recompute: str = "") -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, norm) for _ in range(3))
        self.act: nn.Module = nn.Identity()
        self.head = nn.Linear(8, 16)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits; the blocks perhaps checkpointed."""
        x: Tensor = self.emb(tokens)
        for block in self.blocks:
            again = self.recompute == "re-entrant"
            x = checkpoint(block, x, use_reentrant=again) if self.recompute else block(x)
        logits: Tensor = self.head(self.act(x))
        return logits


class ConvNet(nn.Module):
    """Two convolutions, BatchNorm, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.act: nn.Module = nn.Identity()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Shares one ReLU."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.act(self.relu(self.bn2(self.conv2(x))))
        logits: Tensor = self.head(x.mean((-1, -2)))
        return logits


class Cell(nn.Module):
    """h ↦ W h + x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """One step."""
        return h @ self.weight + x


class Recurrent(nn.Module):
    """An embedding, some recurrent module that returns (outputs, state), or a cell that is called again and again."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(16, 8), rnn, nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits at every place."""
        x = self.emb(tokens)
        if isinstance(self.rnn, Cell):
            h, seen = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = self.rnn(h, x[:, t])
                seen.append(h)
            hidden = torch.stack(seen, 1)
        else:
            hidden, _ = self.rnn(x)
        logits: Tensor = self.head(hidden)
        return logits
