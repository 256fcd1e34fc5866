"""What the schema of an op says: which arguments it reads and writes, and whether it is a view."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator

# Ops that return memory without writing it.
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
# Ops that write all of an argument, and do not read it.
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
# Ops that write a part of an argument, and do not read it.
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
# Positions of arguments that an op writes though its schema does not say so: running statistics.
_UNDECLARED = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
# Ops of communication, which goes on after the op returned: what it receives is scanned when an op
# reads it.
_LATE = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_MAX_ARGUMENTS = 32  # of an op without a schema
_WAIT = "wait_tensor"  # waits for a communication
_IGNORED = ("profiler",)


class OpInfo:
    """What the schema of an op says.

    Attributes:
        name: with namespace and overload: "aten.add.Tensor".
        arguments: names of its arguments, in their order.
        defaults: default values by name.
        written: names of the arguments that it writes.
        overwrites: those of them that it writes whole and does not read.
        fills: those of them that it writes in part and does not read.
        is_view: it returns a view of its first argument, and writes nothing.
        reads: its result depends on the values of its tensors, not on their shapes alone.
        empty: it returns memory without writing it.
        late: it returns before what it receives has been written.
        ignored: it computes nothing.
    """

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
        "reads",
        "written",
    )

    def __init__(self, func: Any) -> None:
        if isinstance(func, HigherOrderOperator):  # such as flex_attention: no schema
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
        if namespace == "c10d" and base != "send":  # its schemas do not say so
            written |= {i for i, name in enumerate(self.arguments) if not name.startswith("input")}
        self.written = frozenset(self.arguments[i] for i in written)
        outs = frozenset(a.name for a in schema.arguments if a.is_out)
        self.is_view = bool(getattr(func, "is_view", False)) and not written
        self.reads = not base.endswith("_like") and not base.startswith("new_")
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
        self.reads = True
