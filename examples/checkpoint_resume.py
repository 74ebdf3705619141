"""Stop in the middle of an epoch, resume, and end with bit-identical weights.

Run it: `python examples/checkpoint_resume.py`. Look at `train`, the whole program. It is started three times: to the
end, to update 70, and again. After a power cut the updates since the last checkpoint are computed again,
bit-identical.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import steadystep


def data(rows: int, seed: int) -> TensorDataset:
    """Return a smooth function of four of eight features, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=rng)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:4] + 0.1 * torch.randn(rows, 1, generator=rng)
    return TensorDataset(x, y)


def train(run_dir: Path, stop_at: int | None = None) -> tuple[int, nn.Module]:
    """Resume from the newest checkpoint of the folder; return the updates of this start, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(1024, seed=1), batch_size=32, shuffle=True)

    def loss_of(batch: list[Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    with steadystep.Guard.resume(model, optimizer, run_dir=run_dir, config={"monitoring": {"sinks": []}}) as guard:
        begun = guard.updates
        for _ in range(guard.epoch, 5):
            for batch in guard.batches(loader):
                guard.step(loss_of, batch=batch)
                if guard.updates == stop_at:
                    return guard.updates - begun, model
        return guard.updates - begun, model


def main() -> tuple[list[int], bool]:
    """Return the updates of each start, and whether the weights equal those of the uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        (whole, model), (first, _) = train(Path(folder, "a")), train(Path(folder, "b"), stop_at=70)
        second, resumed = train(Path(folder, "b"))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    print(f"{whole} updates at once, or {first} and then {second}: the same weights: {same}")
    return [whole, first, second], same


if __name__ == "__main__":
    main()
