"""What the schema of an op says: what it reads, what it writes, whether it computes anything."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator

# Ops whose result is memory as it was found, and ops that write into an argument without reading
# it: into all of it, or into parts.
_EMPTY = frozenset(
    [
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "resize_",
        "resize",
    ]
)
_OVERWRITE = frozenset(
    [
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "eye_",
        "set_",
        "_foreach_copy_",
        "_foreach_zero_",
    ]
)
_FILL = frozenset(
    [
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put_",
        "index_copy_",
        "index_fill_",
        "scatter_",
        "masked_fill_",
        "masked_scatter_",
        "put_",
    ]
)
# batch_norm changes its running statistics, and its schema does not say so.
_UNDECLARED = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
# Communication goes on behind the op: what it receives is read when somebody reads it.
_LATE = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_MAX_ARGUMENTS = 32  # of an op without a schema
_WAIT = "wait_tensor"
_IGNORED = ("profiler",)


class OpInfo:
    """What an op's schema says of it."""

    __slots__ = (
        "arguments",
        "defaults",
        "empty",
        "fills",
        "ignored",
        "is_view",
        "late",
        "name",
        "overwrites",
        "written",
    )

    def __init__(self, func: Any) -> None:
        if isinstance(func, HigherOrderOperator):  # such as flex_attention: it has no schema
            self._init_without_schema(func)
            return
        schema = func._schema  # noqa: SLF001 - no public spelling
        namespace, _, base = schema.name.partition("::")
        self.name = f"{namespace}.{base}.{schema.overload_name or 'default'}"
        self.arguments = [argument.name for argument in schema.arguments]
        self.defaults = {
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        }
        written = {
            i
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        written |= set(_UNDECLARED.get(base, ()))
        self.late = namespace in _LATE and base != _WAIT
        if namespace == "c10d" and base != "send":  # whose schemas do not say so
            written |= {i for i, name in enumerate(self.arguments) if not name.startswith("input")}
        self.written = frozenset(self.arguments[i] for i in written)
        outs = frozenset(a.name for a in schema.arguments if a.is_out)
        self.is_view = bool(getattr(func, "is_view", False)) and not written
        self.empty = base in _EMPTY
        self.ignored = namespace in _IGNORED
        self.overwrites = self.written if base in _OVERWRITE else outs
        self.fills = self.written if base in _FILL or self.late else frozenset()
        if base == _WAIT:
            self.fills = frozenset(self.arguments)

    def _init_without_schema(self, func: HigherOrderOperator) -> None:
        self.name = f"{func.namespace}.{func.name()}"  # type: ignore[no-untyped-call]
        self.arguments = [f"args[{i}]" for i in range(_MAX_ARGUMENTS)]
        self.defaults = {}
        self.written = self.overwrites = self.fills = frozenset[str]()
        self.is_view = self.empty = self.late = self.ignored = False
