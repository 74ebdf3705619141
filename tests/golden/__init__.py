"""Decision traces of a sample of the field, frozen: a change that claims to keep the behaviour reproduces them."""
