"""The table of running sequences."""

from __future__ import annotations

import numpy as np
import torch

from headrace.rollout.rows import STATE


def test_a_column_of_a_single_row_can_go_to_torch():
    """numpy calls it contiguous whatever its stride is; torch wants the stride to be whole items."""
    state = np.zeros(1, STATE)
    for name in STATE.names or ():
        torch.from_numpy(np.ascontiguousarray(state[name]))
