"""Site: the name of a place in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "input", "output", "grad_output", "grad", "param", "buffer", "state", "loss", "probe"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_KINDS: tuple[Kind, ...] = ("input", "output", "grad", "param", "buffer", "loss", "probe")


@dataclass(frozen=True)
class Site:
    """A named place in a model.

    Attributes:
        name: qualified name of the module or parameter; the root module goes by its class.
        kind: what of it: "input", "output", "grad_output" (the gradient that reaches an output),
            "param", "grad", "buffer", "state" (an optimizer's moment), "loss" or "probe".
        path: argument path, such as "[0]", ".mask" or "[1].hidden"; the name of the moment for
            "state"; "" for a module's only output; " (recomputed)" at its begin where a checkpoint
            ran the module again in backward.
    """

    name: str
    kind: Kind
    path: str = ""

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"loss{self.path}"
        if self.kind == "state":
            return f"{self.name} {self.path}"
        return f"{self.name} {self.kind}{self.path}"
