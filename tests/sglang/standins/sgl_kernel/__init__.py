"""In place of SGLang's kernels for CPUs, which are on no package index: what a plain model on a CPU without AMX calls,
in torch. All else raises when it is called."""

from __future__ import annotations

import importlib

import torch

from tests.sglang.standins.placeholders import stand_in_for

__getattr__ = stand_in_for("sgl_kernel")


class _AnyType:
    """Number types by name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


_scalar_type = importlib.import_module("sgl_kernel.scalar_type")
_scalar_type.scalar_types = _AnyType()  # type: ignore[attr-defined]
_scalar_type.ScalarType = str  # type: ignore[attr-defined]


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    *_: object,
) -> None:
    """Write down where the new tokens of each request lie."""
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start
