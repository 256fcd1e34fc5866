"""Options: what `enable` takes, validated once."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nanscan._collect.tensors import Wants
from nanscan._data.site import DEFAULT_KINDS, KINDS, Kind, Site
from nanscan._output.sinks import Action, sinks_of

Filter = str | type[nn.Module] | Iterable[str | type[nn.Module]]
Ignore = str | torch.dtype | Iterable[str | torch.dtype] | Callable[[Site, torch.dtype], bool]


@dataclass(frozen=True)
class Options:
    """The options of `enable`, which has their documentation.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: an unknown kind or action, or a number out of range.
    """

    kinds: Iterable[Kind | str] = DEFAULT_KINDS
    action: Action | Iterable[Action] = "warn"
    history: int = 16
    near_limit: float = 0.5
    max_skipped_steps: int = 20
    ignore: Ignore = ()
    include: Filter | None = None
    exclude: Filter = ()
    every_n_steps: int = 1
    warmup_steps: int = 0
    max_overhead: float | None = None
    skip_step: bool = False
    save_dir: str | os.PathLike[str] | None = None
    locate: bool = False

    def __post_init__(self) -> None:
        kinds = (self.kinds,) if isinstance(self.kinds, str) else self.kinds
        self._set("kinds", frozenset(Kind(kind) for kind in kinds))
        for name in ("action", "exclude", "include", "ignore"):  # an iterator is read only once
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, (str, type)):
                self._set(name, tuple(value))
        sinks_of(self.action)
        wants(self.include, self.exclude)
        ignores(self.ignore)
        self._check_switches()
        self._check_numbers()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_switches(self) -> None:
        for name in ("skip_step", "locate"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"nanscan: {name} must be True or False, got {value!r}")
        if self.skip_step and Kind.GRAD not in self.all_kinds:
            raise ValueError('nanscan: skip_step needs gradients: add "grad" to kinds')
        if self.save_dir is not None and not isinstance(self.save_dir, (str, os.PathLike)):
            raise TypeError(
                f"nanscan: save_dir must be the path of a folder or None, got {self.save_dir!r}"
            )

    def _check_numbers(self) -> None:
        self._check_count("history", 1, "a positive number of steps")
        self._check_count("max_skipped_steps", 2, "at least 2")
        self._check_count("every_n_steps", 1, "a positive number of steps")
        self._check_count("warmup_steps", 0, "a number of steps")
        if not 0 < self.near_limit <= 1:
            raise ValueError(f"nanscan: near_limit must be in (0, 1], got {self.near_limit!r}")
        if self.max_overhead is not None and not 0 < self.max_overhead < 1:
            raise ValueError(f"nanscan: max_overhead must be in (0, 1), got {self.max_overhead!r}")

    def _check_count(self, name: str, least: int, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"nanscan: {name} must be {what}, got {value!r}")

    @property
    def all_kinds(self) -> frozenset[Kind]:
        """What to scan."""
        return frozenset(Kind(kind) for kind in self.kinds)

    @property
    def folder(self) -> Path | None:
        """Where bad steps are saved; None: nowhere."""
        return None if self.save_dir is None else Path(self.save_dir)


def wants(include: Filter | None, exclude: Filter) -> Wants:
    """`include` and `exclude` of `enable` as one function.

    Raises:
        TypeError: a filter is neither a name nor a type of module.
    """
    included = None if include is None else _matcher(include)
    excluded = _matcher(exclude)
    return lambda names, module: (
        # A parameter goes with its module unless its own name is left out.
        (included is None or module is None or any(included(name, module) for name in names))
        and not any(excluded(name, module) for name in names)
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
        or any(name == str(site) or fnmatch.fnmatchcase(site.name, name) for name in names)
    )
