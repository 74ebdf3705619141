"""Row 3: networks that chase each other, a DQN with its target network and GANs, were held for diverging."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.records import Outcome
from tests.seen.rl import DQN
from tests.seen.tasks import GAN, mlp, ring
from tests.seen.twins import Way, assert_untouched, compare


@pytest.mark.parametrize("way", [pytest.param("guard", marks=pytest.mark.slow), "watch"])
def test_a_dqn_is_left_alone(way: Way) -> None:
    """CartPole, 120-84, Adam 1e-3, batches of 128, the target copied every 100 of 400 updates."""
    assert_untouched(compare(DQN(400), [1], way))


@pytest.mark.parametrize("way", ["guard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_gan_is_left_alone(way: Way) -> None:
    """Eight Gaussians on a ring, 64-64 MLPs, Adam 1e-3 (0.5, 0.999), batches of 64; one guard for each player."""
    assert_untouched(compare(GAN(400), [0], way))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["guard", "batch", "watch"])
@pytest.mark.parametrize("program", [DQN(), GAN()], ids=["dqn", "gan"])
def test_more_of_both_are_left_alone(program: Any, way: Way) -> None:
    """The same over 1,200 and 1,000 updates, three seeds."""
    assert_untouched(compare(program, range(3), way))


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_a_gan_in_lightning_is_left_alone(tmp_path: Path) -> None:
    """Manual optimization, two optimizers with toggle_optimizer, StabilityCallback; 250 batches of 64, Adam 1e-3."""
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from steadystep.integrations.lightning import StabilityCallback

    class Adversarial(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.judge, self.maker = mlp(2, 64, 64, 1), mlp(8, 64, 64, 2)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
            (x, z), bce = batch, nn.functional.binary_cross_entropy_with_logits
            yes, no = torch.ones(64, 1), torch.zeros(64, 1)
            one, two = self.optimizers()
            self._update(one, lambda: bce(self.judge(x), yes) + bce(self.judge(self.maker(z).detach()), no))
            self._update(two, lambda: bce(self.judge(self.maker(z)), yes))

        def _update(self, optimizer: Any, loss: Any) -> None:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> list[Any]:
            nets = (self.judge, self.maker)
            return [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in nets]

        def on_train_batch_end(self, *_: Any) -> None:
            watchers = [w for c in self.trainer.callbacks if isinstance(c, StabilityCallback) for w in c.watchers]
            seen.extend(watcher.outcome for watcher in watchers)
            causes[:] = [watcher.guard.diagnose()[0].cause for watcher in watchers]

    def fit(callbacks: list[Any]) -> list[Tensor]:
        seed_everything(0, verbose=False)
        rng = torch.Generator().manual_seed(0)
        data = [(ring(64, rng), torch.randn(64, 8, generator=rng)) for _ in range(250)]
        module, quiet = Adversarial(), {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=callbacks,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
        return [p.detach() for p in module.parameters()]

    seen: list[Outcome] = []
    causes: list[str] = []
    alone, guarded = fit([]), fit([StabilityCallback()])
    said = [f"{f.step} {f.detector}: {f.what}" for o in seen for f in o.findings if f.severity != "info"]
    acts = [f"{o.step} {o.plan.actions}" for o in seen if not o.plan.proceeds]
    assert (acts, said, causes) == ([], [], ["healthy"] * 2)
    assert all(torch.equal(a, b) for a, b in zip(alone, guarded, strict=True))
