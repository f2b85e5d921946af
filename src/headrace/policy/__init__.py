"""The model that rollout and learner share: loading, attention, log-probs."""

from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # of loading and saving: runs have a display of their own
