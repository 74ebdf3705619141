"""The questions about where behaviours are decided have one answer each in the code as it is."""

from tools.ask_tree import answer, behaviours, definitions


def test_there_are_forty_different_questions() -> None:
    known = behaviours()
    assert len(known) == len({b.question for b in known}) == len({b.symbol for b in known}) == 40


def test_every_symbol_is_defined_exactly_once() -> None:
    defined = definitions()
    answers = [answer(symbol, defined) for behaviour in behaviours() for symbol in behaviour.symbols]
    assert [text for text, found in answers if not found] == []


def test_a_symbol_that_is_gone_or_doubled_is_said_so() -> None:
    defined = {"Gate.open": ["src/a.py"], "shut": ["src/a.py", "src/b.py"]}
    assert answer("Gate.open", defined) == ("src/a.py (Gate.open)", True)
    assert answer("Gate.close", defined)[0].startswith("MISSING")
    assert answer("shut", defined)[0].startswith("AMBIGUOUS")
