"""The faults, and where each was put."""

from collections.abc import Callable
from typing import Any

from torch import nn

from planted.networks import Act, Cell, ConvNet, Recurrent, RMSNorm, Transformer
from planted.planting import (
    WrongDerivative,
    case,
    distance,
    evaluating,
    filled,
    log_of_positive,
    log_of_zero,
    put,
    root_below_top,
    root_of_zero,
    times,
)

NAN, INF = float("nan"), float("inf")


def _rnn(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Recurrent(kind(8, 8, batch_first=True, **options))


GPT = Transformer
PLANTED = (
    # forward
    case("embedding: one row is NaN", "emb", "weights", GPT, filled("emb.weight", NAN, 3)),
    case("attention: logits overflow", "blocks.1.attn", "forward", GPT, times("blocks.1.attn.qkv.weight", 1e21)),
    case("attention: all is masked", "blocks.2.attn", "forward", GPT, put("blocks.2.attn", "masked", True)),
    case("norm: a gain is infinite", "blocks.1.norm2", "weights", GPT, filled("blocks.1.norm2.weight", INF, 2)),
    case("norm: zero over zero", "blocks.0.norm1", "forward", lambda: GPT(RMSNorm), filled("emb.weight", 0.0, 5)),
    case("residual: branch overflows", "blocks.1", "forward", GPT, put("blocks.1", "gain", 1e39)),
    case(
        "MLP: product overflows",
        "blocks.0.mlp.2",
        "forward",
        GPT,
        times("blocks.0.mlp.0.weight", 1e20),
        times("blocks.0.mlp.2.weight", 1e20),
    ),
    case(
        "convolution: overflow",
        "conv2",
        "forward",
        ConvNet,
        times("bn1.weight", 1e20),
        times("conv2.weight", 1e20),
        image=1.0,
    ),
    case(
        "BatchNorm: negative variance",
        "bn2",
        "forward",
        ConvNet,
        filled("bn2.running_var", -1.0, 1),
        evaluating,
        image=1.0,
    ),
    case(
        "BatchNorm: variance is NaN",
        "bn1",
        "weights",
        ConvNet,
        filled("bn1.running_var", NAN, 1),
        evaluating,
        image=1.0,
    ),
    case(
        "RNN: grows over time",
        "rnn",
        "forward",
        _rnn(nn.RNN, nonlinearity="relu"),
        times("rnn.weight_hh_l0", 1e5),
        times("rnn.weight_ih_l0", 1e3),
    ),
    case("LSTM: a weight is NaN", "rnn", "weights", _rnn(nn.LSTM), filled("rnn.weight_hh_l0", NAN, (0, 0))),
    case("cell called 12 times: overflow", "rnn", "forward", lambda: Recurrent(Cell()), times("rnn.weight", 1e5)),
    case("loss: logarithm of zero", "", "loss", GPT, loss=log_of_zero),
    case("data: an infinite pixel", "", "input", ConvNet, image=INF),
    # backward
    case("loss: root of zero", "", "backward", GPT, loss=root_of_zero),
    case("activation: log behind where", "act", "backward", GPT, put("", "act", Act(log_of_positive))),
    case("distance of zero", "act", "backward", GPT, put("", "act", Act(distance))),
    case(
        "norm: epsilon missing, gradient overflows",
        "blocks.0.norm1",
        "backward",
        lambda: GPT(RMSNorm),
        times("emb.weight", 1e-18),
        times("blocks.0.norm1.weight", 1e25),
        times("blocks.0.attn.qkv.weight", 1e-25),
        times("head.weight", 1e3),
    ),
    case(
        "convolution: custom operation after it",
        "act",
        "backward",
        ConvNet,
        put("", "act", Act(WrongDerivative.apply)),
        image=1.0,
    ),
    case(
        "convolution: root of zero after it", "act", "backward", ConvNet, put("", "act", Act(root_below_top)), image=1.0
    ),
    case(
        "cell called 12 times: gradient overflows",
        "rnn",
        "backward",
        lambda: Recurrent(Cell()),
        filled("emb.weight", 0.0),
        times("rnn.weight", 1e4),
    ),
    case(
        "attention, checkpointed: custom operation",
        "blocks.1.mlp.1",
        "backward",
        lambda: GPT(recompute="yes"),
        put("blocks.1.mlp", "1", Act(WrongDerivative.apply)),
    ),
    case(
        "attention, re-entrant checkpoint",
        "blocks.1.mlp.1",
        "backward",
        lambda: GPT(recompute="re-entrant"),
        put("blocks.1.mlp", "1", Act(WrongDerivative.apply)),
    ),
    # fp16 under autocast
    case(
        "fp16 MLP: overflow",
        "blocks.1.mlp.2",
        "forward",
        GPT,
        times("blocks.1.mlp.0.weight", 3e2),
        times("blocks.1.mlp.2.weight", 3e2),
        fp16=True,
    ),
    case(
        "fp16 attention: logits overflow",
        "blocks.0.attn",
        "forward",
        GPT,
        times("blocks.0.attn.qkv.weight", 1e3),
        fp16=True,
    ),
    case("fp16 residual: a sum overflows", "blocks.0", "forward", GPT, put("blocks.0", "gain", 1e39), fp16=True),
    case("fp16 convolution: overflow", "conv1", "forward", ConvNet, times("conv1.weight", 1e5), image=1.0, fp16=True),
    case(
        "fp16 cell: the state is too large for its format",
        "rnn",
        "forward",
        lambda: Recurrent(Cell()),
        times("emb.weight", 1e5),
        fp16=True,
    ),
    case(
        "fp16 head: scaled gradient overflows",
        "head",
        "backward",
        GPT,
        times("head.weight", 1e3),
        fp16=True,
        scale=2.0**16,
    ),
    case(
        "fp16 attention: gradient overflows",
        "blocks.2.attn.out",
        "backward",
        GPT,
        times("blocks.2.attn.out.weight", 3e3),
        times("blocks.2.attn.qkv.weight", 1e-3),
        times("blocks.2.attn.qkv.bias", 1e-3),
        fp16=True,
        scale=2.0**14,
    ),
)
