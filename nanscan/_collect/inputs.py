"""KeptInputs: what went into the last call of each outermost module, kept until it is judged."""

from __future__ import annotations

import dataclasses
import logging
import random
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan._collect.names import Registry
from nanscan._data.kept import PLAIN, TENSORS, KeptCall, KeptTensor
from nanscan._data.text import type_name

_logger = logging.getLogger("nanscan")

_MAX_CALLS = 8  # outermost modules of one step whose last call is kept
_MAX_DEPTH = 16  # of nested containers


class KeptInputs:
    """Keeps how calls of outermost modules began, without a copy of any tensor.

    Args:
        registry: places of modules.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._calls: dict[int, KeptCall] = {}  # by id(module), latest last
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
        self._calls.pop(id(module), None)
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
        return KeptCall(
            weakref.ref(module),
            None,  # a module may get its place later in the call
            _structure(args, "args", notes),
            _structure(kwargs, "kwargs", notes),
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
        self._calls.clear()


def _structure(x: Any, path: str, notes: dict[str, str], depth: int = 0) -> Any:
    """Containers copied, tensors in a KeptTensor, None for what cannot be loaded, with a note."""
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind in TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001
        return KeptTensor(x, None if x.is_inference() else x._version, path)  # noqa: SLF001
    if depth < _MAX_DEPTH:
        if isinstance(x, (tuple, list)):
            plain: Any = list if isinstance(x, list) else tuple
            if kind is not plain:
                notes[path] = f"a {type_name(x)}, kept as a {plain.__name__}"
            return plain(
                _structure(item, f"{path}[{i}]", notes, depth + 1) for i, item in enumerate(x)
            )
        if isinstance(x, Mapping) and all(type(key) in PLAIN for key in x):
            if kind not in (dict, OrderedDict):
                notes[path] = f"a {type_name(x)}, kept as a dict"
            pairs = (
                (key, _structure(value, f"{path}[{key!r}]", notes, depth + 1))
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
