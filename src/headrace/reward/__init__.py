"""Scoring: reward functions in processes of their own, with timeouts, retries and a cache."""
