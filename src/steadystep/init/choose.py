"""Which rule a tensor gets: by the type of the module that owns it."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from steadystep.init import rules
from steadystep.init.residual import is_projection
from steadystep.init.rules import InitMethod, Rule
from steadystep.init.slots import Slot

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_FUSED = ("qkv", "c_attn", "in_proj", "query_key_value", "Wqkv", "qkv_proj")
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_CELL_GATES: dict[type[nn.RNNCellBase], int] = {nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}


def choose(slot: Slot, method: InitMethod) -> Rule | str:
    """The rule, or the reason why there is none."""
    if slot.frozen:
        return "frozen"
    if not slot.value.is_floating_point():
        return f"not a real number ({slot.value.dtype})"
    module = slot.module
    if isinstance(module, _NORMS):
        return rules.constant(1.0 if slot.key == "weight" else 0.0)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and slot.key == "weight":
        return rules.embedding(module.padding_idx)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(slot, method)
    if isinstance(module, nn.RNNBase):
        return _recurrent(slot, _GATES.get(module.mode, 1))
    if isinstance(module, nn.RNNCellBase):
        return _recurrent(slot, next((n for kind, n in _CELL_GATES.items() if isinstance(module, kind)), 1))
    if isinstance(module, nn.Bilinear | _ConvNd) or is_projection(module):
        return _linear(slot, method)
    return f"no rule for {type(module).__name__}"


def _linear(slot: Slot, method: InitMethod) -> Rule | str:
    module, shape = slot.module, slot.value.shape
    if slot.key == "bias":
        return rules.constant(0.0)
    if slot.key != "weight" or len(shape) < 2:  # older torch.nn.utils.weight_norm, or a flattened shard
        return f"no rule for a {len(shape)}-dimensional {slot.key}"
    transposed = isinstance(module, _ConvTransposeNd) or type(module).__name__ == "Conv1D"
    outs, ins = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    fused = slot.path.split(".")[-1] in _FUSED and outs == 3 * ins
    return rules.weight(method, shape, transposed=transposed, parts=3 if fused else 1)


def _attention(slot: Slot, method: InitMethod) -> Rule | str:
    if slot.key == "in_proj_weight":
        return rules.weight(method, slot.value.shape, parts=3)
    if slot.key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return rules.weight(method, slot.value.shape)
    return rules.constant(0.0) if slot.key == "in_proj_bias" else rules.normal(rules.SMALL_STD)  # bias_k, bias_v


def _recurrent(slot: Slot, gates: int) -> Rule | str:
    """The same for every recipe: what goes in xavier per gate, what goes round orthogonal."""
    shape = slot.value.shape
    if slot.key.startswith("bias"):
        return rules.forget_gate(gates) if gates == 4 and slot.key.startswith("bias_ih") else rules.constant(0.0)
    if slot.key.startswith("weight_hh"):
        return rules.orthogonal(shape, parts=gates)
    return rules.weight("xavier", shape, parts=gates if slot.key.startswith("weight_ih") else 1)
