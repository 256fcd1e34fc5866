"""Other names for places, once it is known to which model they belong."""

from __future__ import annotations

from torch import nn

from nanscan._collect.compiled_modules import named_modules
from nanscan._data.places import ModulePlace


def rename(
    by_name: dict[str, ModulePlace], top: ModulePlace, before: str, name: str, after: str
) -> list[ModulePlace]:
    """Gives other names to a module and to all inside. Their rows and their history stay.

    Args:
        by_name: all modules by name; is changed.
        top: the module.
        before: what names of its parts begin with.
        name: its new name.
        after: what names of its parts will begin with.

    Returns:
        The module and all inside.
    """
    made_inside = f"{top.name}.<"  # what is made anew in each forward
    inside = [place for place in by_name.values() if place.is_inside(top)]
    for place in inside:
        del by_name[place.name]
    for place in inside:
        if place is top:
            place.rename_tree(name, before, after)
        else:
            is_made = place.name.startswith(made_inside)
            path = place.name.removeprefix(f"{top.name}." if is_made else before)
            place.rename_tree(after + path, f"{place.name}.", f"{after}{path}.")
        by_name[place.name] = place
    _drop_taken(by_name, inside)
    return inside


def _drop_taken(by_name: dict[str, ModulePlace], renamed: list[ModulePlace]) -> None:
    """A former name that something else has now means that."""
    owners = [owner for place in by_name.values() for owner in (place, *place.own())]
    taken = {owner.name for owner in owners}
    for place in renamed:
        for owner in (place, *place.own()):
            owner.former = tuple(name for name in owner.former if name not in taken)


def nested_in(module: nn.Module, roots: dict[str, nn.Module | None]) -> dict[str, str]:
    """Which of some modules lie in a module.

    Args:
        module: the module around them.
        roots: the modules by label; None: it is gone.

    Returns:
        Their names in the module by label.
    """
    names = {id(part): name for name, part in named_modules(module)}
    inside = ((label, names.get(id(root))) for label, root in roots.items())
    return {label: name for label, name in inside if name}


def lies_in(module: nn.Module, around: list[nn.Module]) -> bool:
    """Whether a module lies in one of others."""
    stack = [*around]
    while stack:
        parts = stack.pop()._modules.values()  # noqa: SLF001 - modules() takes 8 times as long
        if module in parts:
            return True
        stack += [part for part in parts if part is not None]
    return False
