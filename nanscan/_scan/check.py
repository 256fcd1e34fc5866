"""check, check_many, assert_finite: one tensor, one pass, one result."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanscan import _C
from nanscan._data.dtypes import DTYPES
from nanscan._data.errors import NonFiniteError
from nanscan._data.result import ScanResult, describe
from nanscan._data.text import dtype_name, type_name
from nanscan._scan.dispatch import scan_anywhere
from nanscan._scan.unwrap import Unscannable, plain_parts, reason


def check(x: torch.Tensor, *, moments: bool = False) -> ScanResult:
    """Scans one tensor of any shape and layout in one pass.

    Args:
        x: floating-point or complex tensor. Sparse tensors are scanned over their stored values,
            tensor subclasses over what they wrap (DTensor: the local shard).
        moments: also take mean, std, rms and the counts of zeros and subnormals.

    Returns:
        The counts and extremes. `first_nonfinite` is the first index in row-major order.

    Raises:
        TypeError: `x` is not a tensor, not floating point, or cannot be scanned.
        ValueError: `x` has elements but no data (meta device, freed storage).
        RuntimeError: the CUDA driver failed; the message names the error and the failed call.

    Synchronization: none on the CPU and on CUDA devices, where the scan is one launch on the
        tensor's current stream; the first one on a device loads the kernels. A tensor on a device
        without kernels is copied to the host.
    """
    result = _C.check(x, moments)
    if result.__class__ is ScanResult:
        return result
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - a subclass may redefine anything
        return _check_other(x, result, moments=moments)


def _check_other(x: torch.Tensor, status: int, *, moments: bool) -> ScanResult:
    """Everything the core does not take as it is: unwraps it, or says what is wrong."""
    if not isinstance(x, torch.Tensor):
        hint = "; check_many takes containers" if isinstance(x, (list, tuple, dict)) else ""
        raise TypeError(f"nanscan: expected a torch.Tensor, got {type_name(x)}{hint}")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"nanscan: expected a floating-point tensor, got {x.dtype}")
    if x.dtype not in DTYPES:
        raise TypeError(f"nanscan: no kernel for {x.dtype}; supported are {_dtype_names()}")
    if x.is_meta:
        raise ValueError("nanscan: expected a tensor with data, got one on the meta device")
    if status == _C.NO_DATA:
        raise ValueError(
            f"nanscan: expected a tensor with data, got one of shape {list(x.shape)} whose storage "
            "is freed"
        )
    row = scan_anywhere(x, moments=moments)
    if not isinstance(row, int):
        return ScanResult(row, tuple(x.shape), x.dtype, moments=moments)
    return _check_parts(x, moments=moments)


def _check_parts(x: torch.Tensor, *, moments: bool) -> ScanResult:
    try:
        parts = plain_parts(x)
    except Unscannable as why:
        raise TypeError(f"nanscan: cannot scan this {type_name(x)}: {why}") from None
    if len(parts) != 1:
        names = ", ".join(name for name, _ in parts) or "none"
        raise TypeError(
            f"nanscan: a {type_name(x)} has several or no floating-point parts ({names}); "
            "check them one by one"
        )
    plain = parts[0][1]
    row = scan_anywhere(plain, moments=moments)
    if not isinstance(row, int):
        return ScanResult(row, tuple(plain.shape), plain.dtype, moments=moments)
    kind = ValueError if row == _C.NO_DATA else TypeError
    raise kind(f"nanscan: cannot scan this {type_name(x)}: {reason(plain, row)}")


def _dtype_names() -> str:
    return ", ".join(dtype_name(dtype) for dtype in DTYPES)


def check_many(tensors: Any, *, moments: bool = False) -> Any:
    """Scans every tensor of a pytree; tensors on one CUDA device share launches.

    Args:
        tensors: any nesting of lists, tuples, dicts, named tuples and registered pytree nodes with
            tensors as leaves. A None leaf (a missing gradient) stays None.
        moments: as for `check`.

    Returns:
        The same structure with a ScanResult for each tensor.

    Raises:
        TypeError: as for `check`; the message names the leaf.
        ValueError: as for `check`; the message names the leaf.

    Synchronization: as for `check`.
    """
    try:
        return _C.check_tree(tensors, moments, _open, pytree.tree_unflatten)
    except _WrongLeafError as wrong:
        leaf, error = wrong.args
    paths = pytree.tree_flatten_with_path(tensors)[0]
    found = (pytree.keystr(path) or "the root" for path, other in paths if other is leaf)
    where = next(found, "a leaf that its node makes anew")
    raise type(error)(f"{error} (at {where})") from None


class _WrongLeafError(Exception):
    """What `check` raised for a leaf of a tree: the leaf, and the error."""


def _open(x: Any, moments: bool) -> ScanResult | tuple[list[Any], pytree.TreeSpec]:
    """An unusual leaf's result; a registered node's children, and how to make the node again."""
    children, spec = pytree.tree_flatten(x, is_leaf=lambda child: child is not x)
    if not spec.is_leaf():
        return children, spec
    try:
        return check(x, moments=moments)
    except (TypeError, ValueError) as error:
        raise _WrongLeafError(x, error) from None


def assert_finite(x: torch.Tensor, name: str | None = None) -> None:
    """Raises unless every element of a tensor is finite.

    Args:
        x: as for `check`.
        name: what to call the tensor in the error.

    Raises:
        NonFiniteError: with counts, the first index and the range of the finite values; `.result`
            holds the ScanResult.
        TypeError: as for `check`.
        ValueError: as for `check`.

    Synchronization: waits for the scan.
    """
    result = check(x)
    if result.is_finite:
        return
    raise NonFiniteError(
        f"nanscan: {name or 'tensor'} is not finite: {describe(result)}", result=result
    )
