"""Which modules to watch, and which findings are of interest, as users say it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

import torch
from torch import nn

from nanscan._collect.names import Wants
from nanscan._data.site import KINDS, Site

Filter = str | type[nn.Module] | Iterable[str | type[nn.Module]]
Ignore = str | torch.dtype | Iterable[str | torch.dtype] | Callable[[Site, torch.dtype], bool]


def wants(include: Filter | None, exclude: Filter) -> Wants:
    """`include` and `exclude` of `enable` as one function.

    Raises:
        TypeError: a filter is neither a name nor a type of module.
    """
    included = None if include is None else _matcher(include)
    excluded = _matcher(exclude)
    return lambda name, module: (
        # A parameter goes with its module unless its own name is left out.
        (included is None or module is None or included(name, module))
        and not excluded(name, module)
    )


def _matcher(rules: Filter) -> Callable[[str, nn.Module | None], bool]:
    listed = (rules,) if isinstance(rules, (str, type)) else tuple(rules)
    for rule in listed:
        if not isinstance(rule, str) and not (
            isinstance(rule, type) and issubclass(rule, nn.Module)
        ):
            raise TypeError(f"nanscan: filters are names or types of modules, got {rule!r}")
    names = [rule for rule in listed if isinstance(rule, str)]
    types = tuple(rule for rule in listed if not isinstance(rule, str))

    def matches(name: str, module: nn.Module | None) -> bool:
        parts = name.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return isinstance(module, types) or any(
            fnmatch.fnmatchcase(outer, rule) for rule in names for outer in around
        )

    return matches


def ignores(rules: Ignore) -> Callable[[Site, torch.dtype], bool]:
    """`ignore` of `enable` as one function.

    Raises:
        TypeError: a rule is of another type.
        ValueError: an unknown kind.
    """
    if callable(rules):
        return rules
    listed = (rules,) if isinstance(rules, (str, torch.dtype)) else tuple(rules)
    names, kinds, dtypes = [], set(), set()
    for rule in listed:
        if isinstance(rule, torch.dtype):
            dtypes.add(rule)
        elif not isinstance(rule, str):
            raise TypeError(f"nanscan: ignore takes names, dtypes or a function, got {rule!r}")
        elif not rule.startswith("kind:"):
            names.append(rule)
        elif rule.removeprefix("kind:") in KINDS:
            kinds.add(rule.removeprefix("kind:"))
        else:
            raise ValueError(f"nanscan: unknown kind in {rule!r}; kinds are {', '.join(KINDS)}")
    return lambda site, dtype: (
        dtype in dtypes
        or site.kind in kinds
        or any(fnmatch.fnmatchcase(site.name, name) for name in names)
    )
