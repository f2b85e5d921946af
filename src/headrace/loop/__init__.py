"""The loop: groups, steps, new versions, checkpoints, and how a run ends or is resumed."""
