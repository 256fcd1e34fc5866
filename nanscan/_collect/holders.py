"""Holders: buffers, plain attributes of modules and objects in arguments; the tensors in them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanscan import _C

_MAX_DEPTH = 4  # of containers and objects in one another
_MAX_TENSORS = 256  # in one attribute, and values in one container
_MAX_FIELDS = 32  # of an object in an attribute; configurations have more
_SECOND_WAIT, _LONGEST_WAIT = 15, 256  # forwards until new attributes are looked for
_OF_MODULES = frozenset(vars(nn.Module()))
_NO_OBJECTS = frozenset(
    {torch.Tensor, nn.Parameter, tuple, list, dict, type(None), bool, int, float, str}
)
_OPAQUE = (nn.Module, nn.Parameter, torch.optim.Optimizer, type, str, bytes, int, float, complex)


@dataclass(eq=False)
class Holder:
    """A buffer or an attribute of a module.

    Attributes:
        module: the module.
        key: its name in the module.
        is_buffer: else it is an attribute.
    """

    module: weakref.ref[Any]
    key: str
    is_buffer: bool

    @property
    def value(self) -> Any:
        """What is there now."""
        module = self.module()
        if module is None:
            return None
        held = module.__dict__
        return (held.get("_buffers", {}) if self.is_buffer else held).get(self.key)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Its tensors of now, by path."""
        return list(itertools.islice(_tensors_in(self.value, self.key), _MAX_TENSORS))

    def read_states(self) -> bytes:
        """Ids and versions of its tensors of now."""
        return _C.held_states(self.value, _MAX_DEPTH)


def attributes_of(module: nn.Module) -> list[str]:
    """Names of a module's own plain attributes that hold tensors."""
    return _C.keys_with_tensors(vars(module), _OF_MODULES, _MAX_DEPTH)


def objects_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments that are objects with fields, with their names. Nearly always none."""
    for index, x in enumerate(args):
        if type(x) not in _NO_OBJECTS and _has_fields(x):
            yield f"input[{index}]", x
    for key, x in kwargs.items():
        if type(x) not in _NO_OBJECTS and _has_fields(x):
            yield key, x


def _has_fields(x: Any) -> bool:
    known = (torch.Tensor, tuple, list, Mapping, *_OPAQUE)
    return not isinstance(x, known) and hasattr(x, "__dict__") and not callable(x)


def next_search(forwards: int) -> int:
    """After how many forwards attributes are to be looked for again.

    After the first forward, which may make caches, then at growing intervals.
    """
    return forwards + min(max(forwards, _SECOND_WAIT), _LONGEST_WAIT) if forwards else 1


def _tensors_in(x: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point tensors in a value, with their paths; none that an optimizer may change."""
    if isinstance(x, torch.Tensor):
        if x.is_floating_point() and not x.requires_grad and type(x) is torch.Tensor:
            yield path, x
        return
    if x is None or isinstance(x, _OPAQUE) or depth >= _MAX_DEPTH:
        return
    try:
        parts = list(itertools.islice(_parts(x), _MAX_TENSORS))
    except Exception:  # noqa: BLE001 - a container of the user's may raise anything
        return
    for label, value in parts:
        yield from _tensors_in(value, path + label, depth + 1)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, with labels."""
    if isinstance(x, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in x.items())
    elif isinstance(x, (tuple, list)):
        yield from ((f"[{index}]", value) for index, value in enumerate(x))
    elif hasattr(x, "__dict__") and len(vars(x)) <= _MAX_FIELDS and not callable(x):
        yield from ((f".{key}", value) for key, value in vars(x).items())
