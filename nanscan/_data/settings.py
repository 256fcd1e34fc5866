"""Settings of optimizers that are not finite, such as a learning rate of Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Settings of torch's optimizers that spoil what they step where they are Inf or NaN, in the order
# in which one is named. Not here is what may be Inf, such as the largest step of Rprop.
_SETTINGS = {
    "lr": "the learning rate",
    "weight_decay": "the weight decay",
    **{name: name for name in ("momentum", "dampening", "eps", "betas", "alpha", "rho")},
    **{name: name for name in ("lambd", "lr_decay", "beta2_decay", "momentum_decay", "etas")},
}
_MAY_BE_INF = ("eps", "momentum_decay", "etas")  # updates are 0 then, or bounded,
_BUT_EPS_OF = ("Adadelta", "Adafactor")  # which multiply by it


@dataclass(frozen=True)
class BadSetting:
    """A setting that is not finite.

    Attributes:
        optimizer: class of the optimizer.
        group: index of the parameter group; None: it is that of all groups.
        name: of the setting: "lr".
        value: Inf or NaN.
        began: what it was before a scheduler changed it; None where no scheduler noted it.
    """

    optimizer: str
    group: int | None
    name: str
    value: float
    began: float | None

    @property
    def what(self) -> str:
        """In words: "the learning rate"."""
        return _SETTINGS[self.name]

    @property
    def where(self) -> str:
        """As code: "param_groups[0]['lr']"."""
        group = "..." if self.group is None else self.group
        return f"param_groups[{group}][{self.name!r}]"


def bad_settings(
    optimizer: str, group: int | None, options: Mapping[str, Any]
) -> Iterator[BadSetting]:
    """Settings that make parameters Inf or NaN, whatever the gradient.

    Args:
        optimizer: class of the optimizer.
        group: index of a parameter group.
        options: of that group.

    Synchronization: none; a setting on a device is not looked at.
    """
    for name in _SETTINGS:
        value = next((x for x in numbers(options.get(name)) if _spoils(optimizer, name, x)), None)
        if value is not None:
            began = next(iter(numbers(options.get(f"initial_{name}"))), None)
            yield BadSetting(optimizer, group, name, value, began)


def numbers(option: object) -> list[float]:
    """The numbers that an option holds: one, or several as betas; [] of a tensor on a device.

    Synchronization: none.
    """
    values = option if isinstance(option, (tuple, list)) else [option]
    return [
        float(number)
        for number in values
        if isinstance(number, (int, float))
        or (isinstance(number, torch.Tensor) and _is_number_on_host(number))
    ]


def _spoils(optimizer: str, name: str, value: float) -> bool:
    may_be_inf = name in _MAY_BE_INF and (name != "eps" or optimizer not in _BUT_EPS_OF)
    return math.isnan(value) or (math.isinf(value) and not may_be_inf)


def _is_number_on_host(x: torch.Tensor) -> bool:
    return x.numel() == 1 and x.device.type == "cpu" and not x.dtype.is_complex
