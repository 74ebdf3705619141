"""Steps that go wrong in one known place."""
