"""The model that rollout and learner share: loading, attention, log-probs."""
