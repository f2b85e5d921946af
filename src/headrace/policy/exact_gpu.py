"""Exact mode on a GPU: batch-invariant GEMMs, where a row's bits do not depend on other rows.

All else on a GPU is batch-invariant anyway: attention, norms, gates and log-probs are our own
kernels, each with one order of its sums. A GEMM is not if its sum is split differently for other
numbers of rows (split-K); cuBLASLt without a workspace does not split it. That is not promised
anywhere, so it is checked, on the shapes of the model at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.errors import ModelError

WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"
FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 224, 256, 320, 512, 1000, 3000)
MANY = 8192
EVEN = 8  # numbers, 16 bytes: other alignments are multiplied by functions that split sums at times


def use_batch_invariant_gemms() -> None:
    """For the rest of the process. Call it before the first GEMM, which makes the workspace."""
    os.environ.setdefault(WORKSPACE, "1")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@torch.no_grad()
def check_rows(products: Mapping[str, tuple[Callable[[Tensor], Tensor], int]], like: Tensor) -> None:
    """Fail unless all `products` (name -> function, width of its input) are batch-invariant."""
    generator = torch.Generator(like.device).manual_seed(0)
    for name, (work, width) in products.items():
        x = torch.randn(MANY, width, generator=generator, device=like.device).to(like.dtype)
        whole = work(x)
        if width % EVEN or whole.shape[-1] % EVEN:
            raise ModelError(
                f"model.exact = true on a GPU is for sizes that {EVEN} divides, and {name} makes "
                f"{whole.shape[-1]} numbers of {width}; set model.exact = false"
            )
        for rows in FEW:
            if not torch.equal(work(x[:rows]), whole[:rows]):
                raise ModelError(
                    f"model.exact = true: on this machine {name} of {rows} tokens differs from that of the "
                    f"same tokens among {MANY}. Start a new process with {WORKSPACE}=1 in its environment, "
                    "or set model.exact = false"
                )
