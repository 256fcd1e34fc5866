"""Steps that an optimizer does not take, since its gradients are bad.

An optimizer is kept from a step by calling it with a stand-in for itself, a shallow copy that has
no parameter groups. So nothing of the user's is changed, and nothing has to be put back, whatever
raises on the way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, Optimizer

from nanscan._collect.closures import Closure, closure_of, with_closure
from nanscan._data.site import Site
from nanscan._scan.unwrap import plain_parts

_logger = logging.getLogger("nanscan")


Gradients = list[tuple[torch.Tensor, tuple[Site, ...]]]  # under all their names
Look = Callable[[], tuple[Gradients, bool]]
Decision = bool | torch.Tensor  # whether to skip; a tensor: only the device knows

_BEFORE = "_nanscan_before"  # a stand-in's attributes as they were; only stand-ins have it
_OURS = ("param_groups", "found_inf")  # the attributes that a stand-in may have of its own
_NORMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SkipStep:
    """Keeps optimizers from stepping on non-finite gradients.

    Args:
        ignores: whether a gradient of that site and dtype may be what it is.
    """

    def __init__(self, ignores: Callable[[Site, torch.dtype], bool]) -> None:
        self._ignores = ignores
        self._warned = False

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What to call a step with instead, or None.

        Args:
            optimizer: whose step it is.
            args: of the step; the first is the optimizer, or the stand-in of another monitor.
            kwargs: of the step.
            look: scans the gradients and returns them, and whether the host knows that those on
                the CPU are finite. Called after the closure where there is one: it makes them.
        """
        closure = closure_of(args, kwargs)
        if closure is None:
            decision = self._decide(optimizer, *look())
            if decision is False:
                return None
            stand_in = _stand_in(args[0])
            _settle(stand_in, decision)
            return (stand_in, *args[1:]), kwargs
        if isinstance(optimizer, LBFGS):
            undo = _Undo(optimizer)
            undoing = _Undoing(
                closure, lambda: undo.note(bad=bool(self._decide(optimizer, *look()))), undo
            )
            return with_closure(args, kwargs, undoing)
        stand_in = _stand_in(args[0])
        looking = Closure(
            closure,
            lambda: _settle(stand_in, self._decide(optimizer, *look())),
            begin=lambda: _reset(stand_in),
        )
        return with_closure((stand_in, *args[1:]), kwargs, looking)

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step returned: gives the optimizer what the step set on its stand-in."""
        closure = closure_of(args, kwargs)
        while isinstance(closure, Closure):
            if isinstance(closure, _Undoing):
                closure.undo.finish()
            closure = closure.inner
        stand_in = args[0]
        if stand_in is optimizer or not is_stand_in(stand_in):
            return
        now, before = vars(stand_in), vars(stand_in)[_BEFORE]
        if now.get("param_groups") is before.get("param_groups"):
            for name, value in now.items():
                if name not in (*_OURS, _BEFORE) and before.get(name, _BEFORE) is not value:
                    setattr(optimizer, name, value)

    def _decide(self, optimizer: Optimizer, gradients: Gradients, host_is_fine: bool) -> Decision:
        suspects = [
            part
            for gradient, sites in gradients
            if not (host_is_fine and _is_on_host(gradient))
            and not any(self._ignores(site, gradient.dtype) for site in sites)
            for part in _parts(gradient)
        ]
        host = [part for part in suspects if _is_on_host(part)]
        device = [part for part in suspects if not _is_on_host(part)]
        if host and bool(_any_nonfinite(host)):
            return True
        if not device:
            return False
        if _takes_found_inf(optimizer):
            return _any_nonfinite(device)
        if device[0].is_cuda and torch.cuda.is_current_stream_capturing():
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "nanscan: a step of %s that a CUDA graph records cannot be skipped; those of "
                    "Adam, AdamW, Adagrad and SGD can with fused=True, from their second step on",
                    type(optimizer).__name__,
                )
            return False
        return bool(_any_nonfinite(device))


def is_stand_in(optimizer: Any) -> bool:
    """Whether this is what a step was called with in place of its optimizer."""
    return _BEFORE in getattr(optimizer, "__dict__", ())


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """A shallow copy: the same attributes, and what is set on it the original never sees."""
    if is_stand_in(optimizer):
        return optimizer
    copy: Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy)[_BEFORE] = dict(vars(optimizer))
    return copy


def _settle(stand_in: Optimizer, decision: Decision) -> None:
    """Makes a stand-in do what was decided; what another monitor decided on it stays."""
    own = vars(stand_in)
    if isinstance(decision, torch.Tensor):
        found, known = decision, own.get("found_inf")
        if known is not None:
            found = found | (known.to(found.device, non_blocking=True) > 0)
        own["found_inf"] = found.to(torch.float32).reshape(())
    elif decision and "param_groups" in own:  # else it is made of optimizers that have their own
        own["param_groups"] = []


def _reset(stand_in: Optimizer) -> None:
    own = vars(stand_in)
    for name in _OURS:
        own.pop(name, None)
        if name in own[_BEFORE]:
            own[name] = own[_BEFORE][name]


def _is_on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _parts(gradient: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in a gradient, of types that torch takes norms of."""
    try:
        parts = [part.detach() for _, part in plain_parts(gradient) if part.numel()]
    except Exception:  # noqa: BLE001 - a subclass may raise anything; coverage() tells of it
        return []
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return [part if part.dtype in _NORMED else part.float() for part in parts]


def _any_nonfinite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether some value is, as a tensor on the device of the first.

    The largest magnitude keeps any NaN or Inf, is read with few launches and, unlike torch's own
    check for GradScaler, leaves the gradients unwritten.
    """
    with torch.no_grad():
        return ~torch.isfinite(torch.nn.utils.get_total_norm(tensors, math.inf))


def _takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether its kernels skip a step by themselves.

    Not where they would have to make state in that step: torch leaves the momentum of a fused SGD
    uninitialised then.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not isinstance(optimizer, (Adam, Adagrad, SGD)):  # the flag alone promises less
        return False
    needed = "momentum_buffer" if isinstance(optimizer, SGD) else "step"
    return all(
        optimizer.state.get(p, {}).get(needed) is not None
        for group in optimizer.param_groups
        if group.get("momentum") != 0
        for p in group["params"]
        if p.grad is not None
    )


# -- LBFGS -----------------------------------------------------------------------------------------


class _Undo:
    """Takes back a step of LBFGS, which moves parameters between the calls of its closure."""

    def __init__(self, optimizer: LBFGS) -> None:
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._state = {
            key: {name: _copied(value) for name, value in state.items()}
            for key, state in optimizer.state.items()
        }
        self._gradients: list[torch.Tensor | None] | None = None  # of the bad call

    def note(self, *, bad: bool) -> None:
        """After each call of the closure."""
        if bad and self._gradients is None:
            self._gradients = [p.grad for p, _ in self._parameters]
            for p, _ in self._parameters:
                p.grad = None  # taken for 0: the search ends here

    def finish(self) -> None:
        """When the step returned."""
        if self._gradients is None:
            return
        with torch.no_grad():
            for (p, value), gradient in zip(self._parameters, self._gradients, strict=True):
                p.copy_(value)
                p.grad = gradient
        state = self._optimizer.state
        for key in list(state):
            if key not in self._state:
                del state[key]
            else:
                state[key].clear()
                state[key].update(self._state[key])
        self._gradients = None


class _Undoing(Closure):
    """A closure with what takes back the steps between its calls."""

    def __init__(
        self, inner: Callable[..., Any], on_gradients: Callable[[], None], undo: _Undo
    ) -> None:
        super().__init__(inner, on_gradients)
        self.undo = undo


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
