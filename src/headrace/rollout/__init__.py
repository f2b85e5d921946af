"""Generation: the embedded engine and the rollout actor that drives it."""
