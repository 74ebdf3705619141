"""From the facts of a run to its causes, by the rules of `rules.py`: each has a weight, and evidence in words.

The weights of the rules that hold are added up for each cause, and a sum of 1 is a diagnosis. So one rule of 1 or
more is enough by itself, and signs that healthy runs show too stay below 1 and count only together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import final

from steadystep.diagnosis import learning_evidence
from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import CONSEQUENCES, EXPLAINED, Cause, Fault
from steadystep.diagnosis.conclusion import conclude_from_curve
from steadystep.diagnosis.facts import Facts, told
from steadystep.diagnosis.learning import is_well_below
from steadystep.diagnosis.rules import EVIDENCE_RULES, FAULT_RULES, REFUTED
from steadystep.records import Diagnosis

_VAGUE = (Cause.NO_LEARNING.value, "")
_ENOUGH, _INCIDENT, _FORGIVEN = 1.0, 1.2, 0.5


def rank(facts: Facts, *, live: bool = False) -> tuple[Diagnosis, ...]:
    """Every cause with enough against it, else what can be said of a run without one.

    Args:
        facts: what is known about the run.
        live: the run is under way and nobody has asked: leave out rules that need the whole run.
    """
    book = _Book()
    for name, seen in facts.incidents.items():
        book.since[name] = seen.first
        if name == Cause.DATA_SHIFT and is_well_below(facts):  # harder data on purpose: a curriculum
            continue
        book.count(Cause(name), None, _INCIDENT + 0.1 * min(math.log2(seen.count), 5.0), told(seen), blames=True)
    for rule in EVIDENCE_RULES if live else (*EVIDENCE_RULES, *FAULT_RULES):
        text = rule.sign(facts)
        if text:
            weight = rule.weight * (_FORGIVEN if rule.forgivable and facts.going_well else 1.0)
            book.count(rule.cause, rule.fault, weight, text, blames=not rule.level, certain=rule.certain)
    for cause, refutes in REFUTED.items():
        if refutes(facts):
            book.drop(cause)
    return tuple(
        Diagnosis(cause=cause, fault=fault, evidence=evidence, advice=_advice(Cause(cause), fault, facts))
        for cause, fault, evidence in book.named()
    ) or (conclude_from_curve(facts, live=live),)


def proven(facts: Facts) -> frozenset[tuple[str, str]]:
    """Cause and fault of all that was seen as it is: no experiment can refute it."""
    certain = [rule for rule in (*EVIDENCE_RULES, *FAULT_RULES) if rule.certain and rule.sign(facts)]
    idle = [(Cause.ZERO_GRADIENT.value, "")] if learning_evidence.idle(facts) else []
    return frozenset([*((rule.cause.value, str(rule.fault or "")) for rule in certain), *idle])


@final
class _Book:
    """Weights and evidence by cause and fault."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """The step of the first incident of each cause."""
        self._scores: dict[tuple[str, str], float] = {}
        self._evidence: dict[tuple[str, str], dict[str, str]] = {}
        self._blamed: set[tuple[str, str]] = set()
        self._certain: set[tuple[str, str]] = set()

    def count(
        self, cause: Cause, fault: Fault | None, weight: float, text: str, *, blames: bool, certain: bool = False
    ) -> None:
        """One piece of evidence."""
        key = cause.value, "" if fault is None else fault.value
        self._scores[key] = self._scores.get(key, 0.0) + weight
        # the same thing only once
        self._evidence.setdefault(key, {}).setdefault(text.rpartition(",")[0] or text, text)
        self._blamed |= {key} if blames else set()
        self._certain |= {key} if certain else set()

    def drop(self, cause: Cause) -> None:
        """Something rules it out."""
        self._scores = {key: score for key, score in self._scores.items() if key[0] != cause}

    def named(self) -> list[tuple[str, str, str]]:
        """Cause, fault and evidence where there is enough: what was seen, other causes, consequences."""
        named = [key for key, score in self._scores.items() if score >= _ENOUGH and key in self._blamed]
        forced = self._effects(named, EXPLAINED)
        effects = self._effects(named, CONSEQUENCES)
        named.sort(key=lambda k: (k == _VAGUE, k in forced, k not in self._certain, k in effects, -self._scores[k]))
        return [(*key, "; ".join(self._evidence[key].values())) for key in named]

    def _effects(self, named: Sequence[tuple[str, str]], table: Mapping[str, set[str]]) -> set[tuple[str, str]]:
        """What another one of them accounts for, unless that came later."""
        return {
            effect
            for effect in named
            for by in named
            if _name(effect) in table.get(_name(by), ()) and not self._is_later(_name(by), _name(effect))
        }

    def _is_later(self, cause: str, effect: str) -> bool:
        return effect in self.since and self.since.get(cause, -1) > self.since[effect]


def _name(key: tuple[str, str]) -> str:
    return key[1] or key[0]


def _advice(cause: Cause, fault: str, facts: Facts) -> str:
    done = facts.done.get(cause)
    if done is None:
        return advise(cause, facts.setup, fault=fault)
    return advise(cause, facts.setup, done.plan, earlier=frozenset(done.actions), fault=fault)
