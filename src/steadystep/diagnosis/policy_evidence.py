"""Signs in a policy: what it earns, how sure it is, and whether anything is left to learn from."""

import math

from steadystep.diagnosis.data_evidence import enough_batches, num_batches, part_named
from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import JUDGED_AFTER, acts, is_policy, reward
from steadystep.diagnosis.output_evidence import first_and_last
from steadystep.records import DetectorName

_LARGE = 500.0  # rewards
FIRST = 16
"""Batches whose rows are counted."""


def flat_reward(facts: Facts) -> str:
    """Every reward is the same."""
    part = reward(facts)
    if part is None or part.smallest != part.largest or not enough_batches(facts):
        return ""
    return f"every reward in {num_batches(facts)} batches is {part.smallest:g}"


def certain_policy(facts: Facts) -> str:
    """A policy that has become certain, while its reward has not risen."""
    first, last = first_and_last(facts)
    part, early = reward(facts), facts.measured.early
    then = None if part is None or early is None else part_named(early, part.name)
    if first is None or last is None or part is None or early is None or then is None or not first.entropy > 0.3:
        return ""
    if last.entropy > 0.1 * first.entropy:
        return ""
    if facts.idle_share > 0.5:
        share = f"the gradient was exactly zero in {facts.idle_share:.0%} of the later steps"
        return f"the entropy of the policy fell from {first.entropy:.3g} to {last.entropy:.3g}; {share}"
    before, count = then.mean, early.batches
    more = num_batches(facts) - count
    if more < 3:
        return ""
    now = (part.mean * num_batches(facts) - before * count) / more
    if now - before > 2.0 * part.std / math.sqrt(more * part.rows) or abs(before) < 0.1 * part.std:
        return ""  # why: advantages are around zero whatever is earned
    return (
        f"the entropy of the policy fell from {first.entropy:.3g} to {last.entropy:.3g}; the mean reward went from "
        f"{before:.3g} to {now:.3g}"
    )


def single_visits(facts: Facts) -> str:
    """A policy that is updated from one or two actions at a time."""
    part = reward(facts)
    if part is None or not acts(facts) or not enough_batches(facts) or not part.counted:
        return ""
    size = part.counted / min(num_batches(facts), FIRST)
    if size > 2.0 or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"an update of the policy is made from {size:.0f} of its actions, whose reward is mostly luck"


def large_rewards(facts: Facts) -> str:
    """Rewards of many hundreds, and gradients that are clipped or units that saturate for it."""
    part = reward(facts)
    if part is None or max(abs(part.mean), part.std) < _LARGE:
        return ""
    signs = (DetectorName.CLIP_RATE, DetectorName.SATURATED_UNITS)
    seen = next((facts.warned[sign] for sign in signs if sign in facts.warned), None)
    if seen is None:
        return ""
    return f"rewards have mean {part.mean:.3g} and standard deviation {part.std:.3g}; {told(seen)}"


def falling_reward(facts: Facts) -> str:
    """A policy that earns less the longer it is trained."""
    change = _change_of_reward(facts)
    if change is None or not change[2] < -4.0:
        return ""
    return f"the mean reward fell from {change[0]:.3g} to {change[1]:.3g}: what pays is made less likely"


def uniform_policy(facts: Facts) -> str:
    """A policy that stays as uncertain as it can be, with a loss that is little but its entropy."""
    last, curve = first_and_last(facts)[1], facts.curve
    if last is None or curve is None or not is_policy(facts) or not facts.signed or len(last.shape) < 2:
        return ""
    most, change = math.log(max(last.shape[-1], 1)), _change_of_reward(facts)
    if not last.entropy > 0.99 * most > 0.0 or curve.late > -1.5 * most or curve.noise > 0.05 * abs(curve.late):
        return ""
    if (change is not None and change[2] > 4.0) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return f"the entropy of the policy is {last.entropy:.4g} of at most {most:.4g}, and the loss is {curve.late:.3g}"


def _change_of_reward(facts: Facts) -> tuple[float, float, float] | None:
    """The mean reward of the first batches and of later ones, and their difference in standard errors."""
    part, early = reward(facts), facts.measured.early
    then = None if part is None or early is None else part_named(early, part.name)
    if part is None or early is None or then is None:
        return None
    more = num_batches(facts) - early.batches
    if more < 3 or not part.std > 0.0:
        return None
    now = (part.mean * num_batches(facts) - then.mean * early.batches) / more
    return then.mean, now, (now - then.mean) / (part.std / math.sqrt(more * part.rows))


def no_signal(facts: Facts) -> str:
    """A policy without any gradient from the start: what it is to learn from has cancelled out."""
    share = facts.idle_share if is_policy(facts) and not any(facts.trace.first_norms) else 0.0
    return f"the gradient of the policy was exactly zero in {share:.0%} of the later steps" if share > 0.5 else ""
