"""replay: runs a saved step again, op by op."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanscan._data.location import Location
from nanscan._locate.api import run
from nanscan._locate.search import Locating
from nanscan._output.save import Saved, load_saved

_MAX_NAMES = 5  # in an error message

_logger = logging.getLogger("nanscan")


def replay(
    path: str | os.PathLike[str],
    model: nn.Module,
    step_fn: Callable[..., Any] | None = None,
) -> Location | None:
    """Runs a step that the monitor's `save` wrote down once more, op by op.

    Args:
        path: the folder of that step.
        model: a model like the one it was of. It gets the step's parameters and buffers, what its
            modules held in plain attributes, and which of them were in training mode.
        step_fn: runs the step; called with the model and the saved arguments of its call:
            `lambda model, x: loss(model(x)).backward()`. None: the forward alone.

    Returns:
        As for `locate`.

    Raises:
        FileNotFoundError: there is no such step.
        ValueError: no arguments were saved.
        RuntimeError: the model is not like the one that was saved; or the step does not run without
            an argument that could not be saved.

    Synchronization: as for `locate`.
    """
    saved = load_saved(path)
    for what, note in saved.notes.items():
        _logger.warning("nanscan: of the saved step, %s is %s", what or "the call", note)
    _restore(saved, model)
    saved.restore_rng()
    with contextlib.ExitStack() as contexts:
        for kind, dtype in saved.autocast.items():
            contexts.enter_context(torch.autocast(kind, dtype=dtype))
        search = Locating(step=saved.step)
        function, args = (model, saved.args) if step_fn is None else (step_fn, (model, *saved.args))
        try:
            return run(search, function, args, saved.kwargs)
        except Exception as error:
            if not saved.missing:
                raise
            raise RuntimeError(
                f"nanscan: the step cannot run again without {', '.join(saved.missing)}: "
                f"{saved.notes[saved.missing[0]]}"
            ) from error


def _restore(saved: Saved, model: nn.Module) -> None:
    """Gives a model what it held before the step."""
    if saved.state_dict is not None:
        if differing := saved.differing(model):
            raise RuntimeError(
                f"nanscan: the model is not like the one that was saved: only one of "
                f"them has {', '.join(differing[:_MAX_NAMES])}"
            )
        model.load_state_dict(saved.state_dict, strict=False)
    for name, buffer in saved.buffers.items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)
    for name, values in saved.attributes.items():
        for key, value in values.items():
            if value is not None:
                setattr(model.get_submodule(name), key, value)
    for name, module in model.named_modules():
        module.training = saved.training.get(name, module.training)
