"""Listener: what a monitor and a search hear of the running model, named as Lightning names it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanscan._data.places import ModulePlace

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener:
    """Events of the running model. A subclass overrides those that it needs.

    Where several threads train, each event comes in the thread in which it happens.
    """

    def on_before_forward(self, place: ModulePlace, args: Any, kwargs: Any) -> None:
        """An outermost module is about to run: no watched module is running in this thread."""

    def on_outermost_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """An outermost module is about to run with these arguments. No code of it has run yet."""

    def on_after_forward(self, place: ModulePlace) -> None:
        """An outermost module returned."""

    def on_first_call(self, place: ModulePlace) -> None:
        """A module is about to run for the first time."""

    def on_before_module(self, module: nn.Module) -> None:
        """Any module is about to run."""

    def on_after_module(self, module: nn.Module, output: Any) -> None:
        """Any module returned; the output is None where it raised."""

    def on_before_backward(self, tensors: Any) -> None:
        """A backward is about to start from these tensors."""

    def on_after_backward(self) -> None:
        """A backward ended without an error."""

    def on_before_clipping(self, parameters: list[torch.Tensor]) -> None:
        """Gradients are about to be scaled by their norm: one NaN then makes all of them NaN."""

    def on_before_scaled_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler is about to step an optimizer, or to skip that step."""

    def on_after_scaled_step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler has stepped an optimizer, or has skipped that step."""

    def on_before_optimizer_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> StepArguments | None:
        """An optimizer is about to step.

        Args:
            optimizer: the optimizer.
            args: positional arguments of its `step`; the first is the optimizer itself.
            kwargs: keyword arguments of its `step`.

        Returns:
            Arguments to call `step` with instead; None: those that it has.
        """

    def on_after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped; the arguments are those that `step` was called with."""
