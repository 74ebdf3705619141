"""`Trainer` as it is used: token ids, adapters, fine-tuning, preference pairs. With a guard, the same bits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from steadystep.integrations.transformers import StabilityCallback
from tests.integrations.tiny_gpt import LENGTH, TOKENS, model, rows
from tests.loops import assert_same, full_state, is_finite

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of trl and transformers, about their own next versions
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 12


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    } | more


class Low(nn.Module):
    """A low-rank adapter around a frozen layer, as PEFT writes them."""

    def __init__(self, base: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(width, 2) / math.sqrt(width))
        self.b = nn.Parameter(torch.zeros(2, out))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.a @ self.b
        return found


def with_adapters(net: Any) -> Any:
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    for block in net.transformer.h:
        block.attn.c_attn = Low(block.attn.c_attn, *block.attn.c_attn.weight.shape)
    return net


def spoiled(net: Any, at: int) -> Any:
    """The forward pass number `at` of a training gives a NaN."""
    calls = iter(range(10_000))

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if module.training and next(calls) == at:
            output.loss = output.loss * math.nan

    net.register_forward_hook(hook)
    return net


def of_tokens(net: Any, folder: Path, callbacks: list[Any], **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    data = [
        {"input_ids": row["labels"], "attention_mask": torch.ones(LENGTH).long(), "labels": row["labels"]}
        for row in rows()
    ]
    args = TrainingArguments(**settings(folder, **more))
    return Trainer(model=net, args=args, train_dataset=data, callbacks=callbacks)


def state_of(trainer: Any) -> dict[str, Tensor]:
    return full_state(trainer.model, trainer.optimizer.optimizer)


@pytest.mark.parametrize(("adapters", "accumulate"), [(False, 1), (True, 1), (False, 2)])
def test_token_ids_are_bit_identical(tmp_path: Path, adapters: bool, accumulate: int) -> None:
    found = []
    for callbacks in ([], [StabilityCallback()]):
        net = with_adapters(model()) if adapters else model()
        run = of_tokens(net, tmp_path, list(callbacks), gradient_accumulation_steps=accumulate)
        run.train()
        found.append(state_of(run))
        assert all(callback.incidents == [] for callback in callbacks)
    assert_same(*found)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_nan_in_a_run_on_token_ids_is_refused(tmp_path: Path, adapters: bool) -> None:
    callback = StabilityCallback()
    net = spoiled(with_adapters(model()) if adapters else model(), at=5)
    run = of_tokens(net, tmp_path, [callback])
    run.train()
    assert [outcome.step for outcome in callback.incidents] == [5]
    assert is_finite(state_of(run))
    assert list((tmp_path / "steadystep" / "incidents").glob("incident-*/batch"))


def with_lora(net: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(net, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))


def test_lora_of_peft_is_bit_identical_and_a_nan_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    ends, callback = [], StabilityCallback()
    for callbacks in ([], [callback]):
        run = of_tokens(with_lora(model()), tmp_path, list(callbacks))
        run.train()
        ends.append(state_of(run))
    assert callback.incidents == []
    assert_same(*ends)
    assert sum("lora_" in name for name in ends[0]) == 4
    callback = StabilityCallback()
    run = of_tokens(spoiled(with_lora(model()), at=5), tmp_path, [callback])
    run.train()
    assert [outcome.step for outcome in callback.incidents] == [5]
    assert is_finite(state_of(run))


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(chr(ord("a") + i) for i in range(TOKENS - 2))]
    vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")


def fine_tuning(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(chr(ord("a") + (i + j) % 8) for j in range(3 + i % 6)) for i in range(32)]
    args = SFTConfig(**settings(folder, max_length=LENGTH, bf16=False))
    data = Dataset.from_dict({"text": texts})
    return SFTTrainer(model=model(), args=args, processing_class=tokenizer(), train_dataset=data, callbacks=callbacks)


def preferences(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = {"prompt": ["a b"] * 32, "chosen": [" c d"] * 32, "rejected": [" d c e"] * 32}
    args = DPOConfig(**settings(folder, max_length=LENGTH, bf16=False))
    net, fixed = model(), model()
    return DPOTrainer(
        model=net,
        ref_model=fixed,
        args=args,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(pairs),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make", [fine_tuning, preferences])
def test_trainers_of_trl_are_bit_identical(tmp_path: Path, make: Any) -> None:
    pytest.importorskip("trl")
    plain = make(tmp_path / "plain", [])
    plain.train()
    callback = StabilityCallback()
    guarded = make(tmp_path / "guarded", [callback])
    guarded.train()
    assert_same(state_of(plain), state_of(guarded))
    assert callback.incidents == []
