"""In the place of SGLang's compiled kernels, which PyPI does not have for CPUs: the three that a server calls there.

Server, scheduler, sampler, cache and weight updates stay SGLang's own; attention is its `torch_native`. Any other
kernel can be imported and raises when it is called.
"""

from typing import Any

import torch

OPS = torch.library.Library("sgl_kernel", "DEF")
OPS.define("init_cpu_threads_env(str cores) -> str")
OPS.define("initialize(int size, int rank) -> ()")
OPS.impl("init_cpu_threads_env", lambda cores: "", "CompositeExplicitAutograd")
OPS.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Write `places`, one row's after the other's, into `table[row, start:end]`."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not here: this is a stand-in for CPUs")

    return missing
