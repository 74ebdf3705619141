"""A real GRPO run of TRL with the callback: bit-identical, its scalars watched."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from tests.integrations.test_examples import example

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of trl and transformers, about their own next versions
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_grpo_is_bit_identical_and_its_scalars_are_in_the_log(tmp_path: Path) -> None:
    main = example("trl_grpo").main
    plain_rewards, _, plain = main(tmp_path / "plain", guarded=False, steps=4)
    rewards, callback, model = main(tmp_path / "guarded", steps=4)
    assert rewards == plain_rewards
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert callback.incidents == []
    log = (tmp_path / "guarded" / "steadystep" / "run.jsonl").read_text()
    assert '"kl"' in log
    assert '"entropy"' in log


@pytest.mark.slow
def test_a_reward_that_teaches_nothing_is_said(tmp_path: Path) -> None:
    example("trl_grpo").main(tmp_path, flat=True, steps=20)
    assert "flat-reward" in (tmp_path / "steadystep" / "run.jsonl").read_text()
