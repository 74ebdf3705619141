"""Parameter groups from rules: who learns how fast, and who is decayed."""

from steadystep.groups.build import param_groups
from steadystep.groups.layer_decay import LayerDecay
from steadystep.groups.rule import Rule, embed_and_attention
from steadystep.groups.table import table

__all__ = ["LayerDecay", "Rule", "embed_and_attention", "param_groups", "table"]
