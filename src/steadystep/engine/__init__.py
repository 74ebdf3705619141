"""One optimizer step: measure, judge, apply, record; and what it takes to do that for any loop."""
