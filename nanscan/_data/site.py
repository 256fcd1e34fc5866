"""Site: the name of a place in a model. Kind: what of a module or parameter it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What of a module or parameter is scanned. Each member equals its text: Kind.GRAD == "grad".

    Attributes:
        is_default: `enable` scans it unless it is given other kinds.
        is_forward: a value that a forward takes or computes.
        is_gradient: autograd computes it.
        is_scaled: a GradScaler multiplies it: the loss and all gradients.
        is_trained: it changes with each optimizer step, so it shows whether training diverges.
        may_be_mask: -Inf alone in it is most likely a mask or a banned logit.
        is_saved: a checkpoint holds it.
        comes_late: it may come up after the forward of the outermost module.
    """

    is_default: bool
    is_forward: bool
    is_gradient: bool
    is_scaled: bool
    is_trained: bool
    may_be_mask: bool
    is_saved: bool
    comes_late: bool

    INPUT = "input", "default forward trained mask"
    OUTPUT = "output", "default forward trained mask"
    GRAD_OUTPUT = "grad_output", "gradient scaled trained late"
    GRAD = "grad", "default gradient scaled trained late"
    PARAM = "param", "default trained saved"
    BUFFER = "buffer", "default mask saved"
    STATE = "state", "saved"
    LOSS = "loss", "default forward scaled trained late"
    PROBE = "probe", "default forward trained mask late"

    def __new__(cls, text: str, traits: str = "") -> Kind:  # noqa: PYI034
        """A member, from its text and the names of the traits that it has."""
        kind = str.__new__(cls, text)
        kind._value_ = text
        has = traits.split()
        kind.is_default, kind.is_forward = "default" in has, "forward" in has
        kind.is_gradient, kind.is_scaled = "gradient" in has, "scaled" in has
        kind.is_trained, kind.may_be_mask = "trained" in has, "mask" in has
        kind.is_saved, kind.comes_late = "saved" in has, "late" in has
        return kind

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        raise ValueError(f"nanscan: unknown kind {value!r}; kinds are {', '.join(cls)}")

    # A member prints, formats and shows as the text that it equals.
    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


KINDS = tuple(Kind)
DEFAULT_KINDS = tuple(kind for kind in Kind if kind.is_default)


@dataclass(frozen=True)
class Site:
    """A named place in a model. `str()` is what reports print: "fc.weight grad".

    Attributes:
        name: qualified name of the module or parameter; the root module goes by its class.
        kind: what of it: "input", "output", "grad_output" (the gradient that reaches an output),
            "param", "grad", "buffer", "state" (an optimizer's moment), "loss" or "probe".
        path: argument path, such as "[0]", ".mask" or "[1].hidden"; the name of the moment for
            "state"; "" for a module's only output; it begins with " (recomputed)" where a
            checkpoint ran the module again in backward.
    """

    name: str
    kind: Kind
    path: str = ""

    def __post_init__(self) -> None:
        if self.kind.__class__ is not Kind:  # a plain string
            object.__setattr__(self, "kind", Kind(self.kind))

    def __str__(self) -> str:
        if self.kind is Kind.LOSS:
            return f"loss{self.path}"
        if self.kind is Kind.STATE:
            return f"{self.name} {self.path}"
        return f"{self.name} {self.kind}{self.path}"
