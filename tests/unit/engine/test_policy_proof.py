"""When rollouts prove that an earlier policy earns more."""

from steadystep.engine.policy_proof import earns_more


def test_equal_and_uncertain_scores_prove_nothing() -> None:
    assert not earns_more([1.0] * 8, [1.0] * 8)
    assert not earns_more([0.0] * 8, [1.0] * 8)
    assert earns_more([1.0] * 8, [0.5] * 8)
    assert not earns_more([9.0, *[0.5] * 7], [0.5] * 8)
