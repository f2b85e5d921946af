"""What happened: token accounts, one row per step, spans of every stage."""
