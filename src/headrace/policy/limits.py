"""What a GPU can do at most, by its datasheet: the limits that rows are measured against."""

import math
from functools import cache

import torch

from headrace.config_file import HARDWARE, letters, read_toml


@cache
def limits(device: torch.device) -> tuple[float, float]:
    """Operations and bytes per second; infinitely many for a device that is not in the table."""
    name = letters(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""
    table = read_toml(HARDWARE, "hardware file")
    if not (known := [other for other in table if letters(other) in name]):
        return math.inf, math.inf
    found = table[max(known, key=len)]  # L40S, not L4
    return float(found["flops_per_s"]), float(found["memory_bytes_per_s"])
