"""The nodes of an autograd graph: each once, whatever reaches it."""

from typing import Any

import torch

from steadystep._utils.tensors import graph_nodes


def test_each_node_is_yielded_once_however_many_ways_lead_to_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    shared = weight * 2
    names = sorted(node.name() for node in graph_nodes([shared * shared, shared + shared], set()))
    assert names == ["AddBackward0", "MulBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]


def test_a_second_walk_yields_only_what_is_new() -> None:
    weight, seen = torch.ones(2, requires_grad=True), set[Any]()
    first = weight * 2
    assert len(list(graph_nodes([first], seen))) == len(seen) == 2
    assert [node.name() for node in graph_nodes([first + 1], seen)] == ["AddBackward0"]


def test_a_tensor_without_a_graph_has_none() -> None:
    assert list(graph_nodes([torch.ones(1)], set())) == []
