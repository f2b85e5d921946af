"""The demo's reward, after a wait that is long-tailed: 0.2 to 3 seconds, the same for the same answer."""

from __future__ import annotations

import asyncio
import math
import zlib
from statistics import NormalDist
from typing import Any

from headrace.recipes.arithmetic import score as solved

MEDIAN_S, SIGMA = 0.6, 0.8
LEAST_S, MOST_S = 0.2, 3.0


def wait_s(text: str) -> float:
    """Log-normal, cut at both ends."""
    place = (zlib.crc32(text.encode()) + 0.5) / 2**32
    return min(MOST_S, max(LEAST_S, math.exp(NormalDist(math.log(MEDIAN_S), SIGMA).inv_cdf(place))))


async def slow(completion: Any) -> Any:
    await asyncio.sleep(wait_s(completion.prompt + completion.text))
    return solved(completion)
