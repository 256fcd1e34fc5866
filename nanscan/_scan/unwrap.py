"""From any tensor to plain ones: what can be scanned as it is, or unwrapped, and what cannot."""

from __future__ import annotations

import os

import torch

from nanscan import _C

_C.initialize(torch.Tensor, torch.nn.Parameter, torch.Tensor.__dlpack_c_exchange_api__)

# For tests and benchmarks; the best one of this machine is chosen otherwise.
if _variant := os.environ.get("NANSCAN_CPU_VARIANT"):
    _C.use_variant(_variant)


_REASONS = {
    _C.NOT_PLAIN: "it is a tensor subclass that does not say what it wraps",
    _C.NO_DATA: "it has no data behind it (freed storage, or a fake or wrapper tensor)",
    _C.NO_VIEW: "torch gives no plain view of it",
}


class Unscannable(TypeError):  # noqa: N818 - a reason, raised only inside nanscan
    """Why a tensor cannot be scanned; str() completes the sentence 'skipped, because ...'."""


def reason(tensor: torch.Tensor, status: int) -> str:
    """Says in words why the core refused a plain tensor."""
    if status == _C.BAD_FORMAT:
        return f"there is no kernel for {tensor.dtype}"
    if status == _C.MISALIGNED:
        return "its address is no multiple of its element's size, which a GPU cannot read"
    if status == _C.NO_VIEW and tensor.dim() > 64:  # noqa: PLR2004 - kMaxDims
        return f"it has {tensor.dim()} dimensions, and 64 are the most that nanscan takes"
    return _REASONS.get(status, f"status {status}")


def plain_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Unwraps a tensor into plain ones, each with the attribute it was found under.

    Sparse tensors give their stored values, subclasses with `__tensor_flatten__` (DTensor, jagged
    nested tensors, ...) their inner tensors, other subclasses their own memory. Views with a
    negative or conjugate bit are resolved, which copies. Integer tensors are left out.

    Returns:
        Pairs of (attribute or "", plain tensor); several only for subclasses with several parts.

    Raises:
        Unscannable: with the reason.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public spelling
        return _plain_parts(tensor)


def _plain_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        raise Unscannable("it is inside a torch.func transform, which hides its values")
    if tensor.is_quantized:
        raise Unscannable("it is quantised, and cannot hold NaN or Inf")
    if tensor.is_nested:
        return [("values", tensor.detach().values())]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return _subclass_parts(tensor)
    if tensor.is_meta:
        raise Unscannable("it is on the meta device, which has no data")
    if tensor.layout == torch.sparse_coo:
        return [("values", tensor.detach()._values())]  # noqa: SLF001 - values() wants coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [("values", tensor.detach().values())]
    if tensor.layout != torch.strided:
        raise Unscannable(f"its layout is {tensor.layout}")
    if tensor.is_neg() or tensor.is_conj():
        return [("", tensor.detach().resolve_conj().resolve_neg())]
    return [("", tensor)]


def _subclass_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [("", tensor.detach().as_subclass(torch.Tensor))]
    parts = []
    for attribute in flatten()[0]:
        inner = getattr(tensor, attribute)
        if isinstance(inner, torch.Tensor) and (inner.is_floating_point() or inner.is_complex()):
            for name, plain in _plain_parts(inner):
                parts.append((f"{attribute}.{name}" if name else attribute, plain))
    return parts
