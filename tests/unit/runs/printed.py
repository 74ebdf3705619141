"""Lines in the manner of common training scripts, made from numbers; every sample is our own."""

from collections.abc import Callable
from typing import NamedTuple


class Point(NamedTuple):
    """What one row of a log says."""

    step: int
    loss: float
    norm: float
    lr: float


Writer = Callable[[Point], str]
GREEN, OFF = "\x1b[32m", "\x1b[0m"


def megatron(p: Point) -> str:
    return (
        f" [2025-03-01 10:{p.step % 60:02d}:07] iteration {p.step:8d}/  500000 | "
        f"consumed samples: {p.step * 256:12d} | elapsed time per iteration (ms): 812.4 | "
        f"learning rate: {p.lr!r} | global batch size:   256 | lm loss: {p.loss!r} | "
        f"loss scale: 1.0 | grad norm: {p.norm!r} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def torchtitan(p: Point) -> str:
    return (
        f"[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - {OFF}{GREEN}step: {p.step:2d}  {GREEN}loss: "
        f"{p.loss!r}  {GREEN}grad_norm: {p.norm!r}  memory: 41.2GiB(52.10%)  tps: 7,282  tflops: 31.4  mfu: 31.8%{OFF}"
    )


def nano_gpt(p: Point) -> str:
    return f"iter {p.step}: loss {p.loss!r}, time 105.21ms, mfu 31.20%"


def llm_c(p: Point) -> str:
    return (
        f"step {p.step:4d}/19560 | loss {p.loss!r} (+0.31z)| norm {p.norm!r} (-0.12z)| lr {p.lr!r} | 345.12 ms | "
        "50.1% bf16 MFU | 1519212 tok/s"
    )


def llm_c_file(p: Point) -> str:
    return f"s:{p.step} trl:{p.loss!r} lr:{p.lr!r} norm:{p.norm!r}"


def llama2_c(p: Point) -> str:
    return f"{p.step} | loss {p.loss!r} | lr {p.lr!r} | 13808.97ms | mfu 0.21%"


def modded(p: Point) -> str:
    return f"step:{p.step}/5100 train_loss:{p.loss!r} train_time:{p.step * 120}ms step_avg:nanms"


def equals(p: Point) -> str:
    return f"2025-03-01 10:00:00 INFO step={p.step} loss={p.loss!r} lr={p.lr!r} grad_norm={p.norm!r}"


def colons(p: Point) -> str:
    return f"INFO:root:step:{p.step}, loss:{p.loss!r}, lr:{p.lr!r}, gnorm:{p.norm!r}"


def hugging_face(p: Point) -> str:
    bar = f"\r {p.step % 100:2d}%|███▏      | {p.step}/90000 [00:12<11:40,  5.35s/it]"
    return f"{bar}\n{{'loss': {p.loss!r}, 'grad_norm': '{p.norm!r}', 'learning_rate': {p.lr!r}, 'epoch': 0.37}}"


def deepspeed(p: Point) -> str:
    return (
        f"[2025-03-01 10:00:00,313] [INFO] [logging.py:96:log_dist] [Rank 0] step={p.step}, skipped=0, "
        f"lr=[{p.lr!r}], mom=[(0.9, 0.95)]\nsteps: {p.step} loss: {p.loss!r} iter time (s): 1.2 norm: {p.norm!r}"
    )


def fairseq(p: Point) -> str:
    return (
        f"2025-03-01 10:00:00 | INFO | train_inner | epoch 001:    {p.step} / 70000 loss={p.loss!r}, ppl=18.2, "
        f"wps=23470, ups=1.62, num_updates={p.step}, lr={p.lr!r}, gnorm={p.norm!r}, clip=0"
    )


def fairseq_json(p: Point) -> str:
    return (
        f'2025-03-01 | INFO | train_inner | {{"epoch": 1, "update": 0.3, "loss": "{p.loss!r}", "num_updates": '
        f'"{p.step}", "lr": "{p.lr!r}", "gnorm": "{p.norm!r}"}}'
    )


def olmo(p: Point) -> str:
    return (
        f"2025-03-01 10:00:00.181 host:0  olmo.train:908  INFO    [step={p.step}/739328,epoch=0]\n"
        f"    optim/total_grad_norm={p.norm!r}\n    optim/learning_rate_group0={p.lr!r}\n"
        f"    train/CrossEntropyLoss={p.loss!r}\n    throughput/total_tokens={4_194_304 * (p.step + 1):,}\n"
    )


def lit_gpt(p: Point) -> str:
    return f"Epoch 1 | iter {p.step * 4} step {p.step} | loss train: {p.loss!r}, val: n/a | iter time: 300.12 ms (step)"


def nemo(p: Point) -> str:
    return (
        f"Epoch 0: :  10%|█         | {p.step}/100000 [00:10<01:30, 1.1it/s, reduced_train_loss={p.loss!r}, "
        f"global_step={p.step}.0, lr={p.lr!r}, grad_norm={p.norm!r}]"
    )


def sentence(p: Point) -> str:
    return f"Loss at step {p.step}: {p.loss!r}"


def numpy_values(p: Point) -> str:
    return f"{{'step': {p.step}, 'loss': np.float64({p.loss!r}), 'grad_norm': tensor({p.norm!r}, device='cuda:0')}}"


def arrows(p: Point) -> str:
    return f"[train] step {p.step} -> loss: {p.loss!r}; lr: {p.lr!r}; grad norm: {p.norm!r}"


FORMATS: dict[str, Writer] = {
    one.__name__: one
    for one in (
        *(megatron, torchtitan, nano_gpt, llm_c, llm_c_file, llama2_c, modded, equals, colons, hugging_face, deepspeed),
        *(fairseq, fairseq_json, olmo, lit_gpt, nemo, sentence, numpy_values, arrows),
    )
}
WITH_NORM = set(FORMATS) - {"nano_gpt", "llama2_c", "modded", "lit_gpt", "sentence"}
WITH_RATE = set(FORMATS) - {"torchtitan", "nano_gpt", "modded", "lit_gpt", "sentence", "numpy_values"}
