"""KeptInputs: what went into the last call of each outermost module, kept until it is judged."""

from __future__ import annotations

import dataclasses
import logging
import random
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan._collect.holders import Holder, attributes_of, next_search
from nanscan._collect.names import Registry
from nanscan._data.kept import PLAIN, TENSORS, KeptCall, KeptTensor, version
from nanscan._data.text import type_name

_logger = logging.getLogger("nanscan")

_MAX_CALLS = 8  # outermost modules of one step whose last call is kept
_MAX_DEPTH = 16  # of nested containers
_MAX_COPIED = 1 << 28  # bytes of one call that are copied


class KeptInputs:
    """Keeps how calls of outermost modules began.

    It copies what calls of a module change in place, such as a KV cache or running statistics, and
    what it has not seen in an earlier call, of which that is not known yet.

    Args:
        registry: places of modules.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._calls: dict[int, KeptCall] = {}  # by id(module), latest last
        # By id(module): which paths its calls change.
        self._changing: dict[int, dict[str, bool]] = {}
        self._attributes: dict[int, _Attributes] = {}  # by id(module)
        self._steps = 0  # that optimizers have taken
        self.is_needed = True  # False: nothing more will be saved
        self._has_warned = False

    @property
    def calls(self) -> tuple[KeptCall, ...]:
        """The last call of each outermost module in this step."""
        places = self._registry.places
        return tuple(
            dataclasses.replace(call, place=places.get(key)) for key, call in self._calls.items()
        )

    def knows(self, module: nn.Module) -> bool:
        """Whether an earlier call of a module in this step would be forgotten for the next."""
        return id(module) in self._calls

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps a call that is about to run. Never raises."""
        if not self.is_needed:
            return
        self._learn(id(module), self._calls.pop(id(module), None))
        try:
            self._calls[id(module)] = self._keep(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - a container of the user's may raise anything
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "nanscan: could not keep the inputs of a step: %s: %s",
                    type(error).__name__,
                    error,
                )
        while len(self._calls) > _MAX_CALLS:
            del self._calls[next(iter(self._calls))]

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> KeptCall:
        notes: dict[str, str] = {}
        began = self._steps
        keep = _Keeper(self._changing.get(id(module), {}))
        attributes = self._attributes.get(id(module))
        if attributes is None or attributes.module() is not module:
            attributes = self._attributes[id(module)] = _Attributes(weakref.ref(module))
        return KeptCall(
            weakref.ref(module),
            None,  # a module may get its place later in the call
            _structure(args, "args", notes, keep),
            _structure(kwargs, "kwargs", notes, keep),
            {name: keep(x, f"state_dict[{name!r}]") for name, x in module.named_buffers()},
            attributes.keep(notes, keep),
            _rng_states(),
            {
                kind: torch.get_autocast_dtype(kind)
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            },
            notes,
            lambda: self._steps != began,
        )

    def note_step(self) -> None:
        """An optimizer took a step."""
        self._steps += 1

    def forget(self) -> None:
        """The step is over."""
        for key, call in self._calls.items():
            self._learn(key, call)
        self._calls.clear()

    def _learn(self, key: int, call: KeptCall | None) -> None:
        """Notes what a call that is over has changed, so that the next one copies it before."""
        if call is not None:
            kept = _kept((call.args, call.kwargs, dict(call.buffers), dict(call.attributes)))
            known = self._changing.setdefault(key, {})
            for x in kept:  # of an inference tensor it is never known
                known[x.path] = known.get(x.path, False) or x.is_changed or x.version < 0


class _Keeper:
    """Puts tensors of one call into a KeptTensor.

    Args:
        changing: whether calls change what lies at a path, as far as it is known.
    """

    def __init__(self, changing: Mapping[str, bool]) -> None:
        self._changing = changing
        self._left = _MAX_COPIED

    def __call__(self, x: torch.Tensor, path: str) -> KeptTensor:
        copy = None
        is_plain = type(x) in TENSORS and x.layout is torch.strided and not x.is_meta
        if self._changing.get(path, True) and is_plain:
            self._left -= x.numel() * x.element_size()
            if self._left >= 0:
                copy = x.detach().clone()
        return KeptTensor(x, version(x), path, copy)


class _Attributes:
    """What the modules inside of one hold as plain attributes, such as a KV cache."""

    def __init__(self, module: weakref.ref[nn.Module]) -> None:
        self.module = module
        self._holders: list[tuple[str, Holder]] = []
        self._calls = self._next_search = 0

    def keep(self, notes: dict[str, str], keep: _Keeper) -> dict[str, dict[str, Any]]:
        """What is there now, by the names of the module and of the attribute."""
        module = self.module()
        if module is not None and self._calls >= self._next_search:
            self._next_search = next_search(self._calls)
            self._holders = [
                (name, Holder(weakref.ref(child), key, is_buffer=False))
                for name, child in module.named_modules()
                for key in attributes_of(child)
            ]
        self._calls += 1
        kept: dict[str, dict[str, Any]] = {}
        for name, holder in self._holders:
            path = f"{name}.{holder.key}".removeprefix(".")
            kept.setdefault(name, {})[holder.key] = _structure(holder.value, path, notes, keep)
        return kept


def _kept(x: Any) -> Iterator[KeptTensor]:
    """The tensors in what `_structure` made."""
    if isinstance(x, KeptTensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from _kept(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from _kept(item)


def _structure(x: Any, path: str, notes: dict[str, str], keep: _Keeper, depth: int = 0) -> Any:
    """Containers copied, tensors in a KeptTensor, None for what cannot be loaded, with a note."""
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind in TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001
        return keep(x, path)
    if depth < _MAX_DEPTH:
        if isinstance(x, (tuple, list)):
            plain: Any = list if isinstance(x, list) else tuple
            if kind is not plain:
                notes[path] = f"a {type_name(x)}, kept as a {plain.__name__}"
            return plain(
                _structure(item, f"{path}[{i}]", notes, keep, depth + 1) for i, item in enumerate(x)
            )
        if isinstance(x, Mapping) and all(type(key) in PLAIN for key in x):
            if kind not in (dict, OrderedDict):
                notes[path] = f"a {type_name(x)}, kept as a dict"
            pairs = (
                (key, _structure(value, f"{path}[{key!r}]", notes, keep, depth + 1))
                for key, value in x.items()
            )
            return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
    notes[path] = f"a {type_name(x)}: left out"
    return None


def _rng_states() -> dict[str, Any]:
    """Synchronization: none, the states of CUDA are on the host."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what users' code draws from
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_rng_states(),
        "python": random.getstate(),
        "numpy": numpy,
    }


def _cuda_rng_states() -> dict[int, torch.Tensor]:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not initialized or torch.cuda.is_current_stream_capturing():
        return {}
    return {i: torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
