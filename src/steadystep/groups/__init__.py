"""Parameter groups from rules: learning rate and weight decay per group."""

from steadystep.groups.build import LayerDecay, param_groups, table
from steadystep.groups.rule import Rule, embed_and_attention

__all__ = ["LayerDecay", "Rule", "embed_and_attention", "param_groups", "table"]
