"""Runs ops one by one, and notes what each took and returned, with a scan of each tensor.

A tensor is scanned once, after the op that made it. An op that reads it later finds that scan by
the tensor's identity and version count. What the scans mean is decided in taint.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nanscan import _C
from nanscan._data.frames import is_called_by, user_frame, user_frame_in_backward
from nanscan._data.places import ModulePlace
from nanscan._locate.schema import OpInfo
from nanscan._locate.values import Event, Value, scan_of, shape_of, storage_of

_node = torch._C._current_autograd_node  # noqa: SLF001 - no public spelling
_sequence_number = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - no public spelling
_SUMS = ("aten.add.Tensor", "aten.add_.Tensor")  # autograd sums gradients with these
# A double backward makes zero tensors without memory. Under a dispatch mode some ops of torch 2.13,
# such as mul.Scalar, crash on these. So they get memory first. Only the two ops of _ZERO_AWARE have
# another result for such zeros.
_ZEROS = "aten._efficientzerotensor.default"
_ZERO_AWARE = ("aten.mul.Tensor", "aten.div.Tensor")
_DETACH = "aten.detach.default"  # of x.detach() and x.data
_LEAF = "torch::autograd::AccumulateGrad"

_infos: dict[int, OpInfo] = {}  # by id(op); ops live as long as the process
_NUMBERS = (int, float, torch.SymInt)


class _Thread(threading.local):
    """What runs in a thread.

    Attributes:
        modules: the running modules, innermost last, whether a backward called each, and which
            call of the module in the step it is.
        optimizer: while an optimizer steps: the code that called `step`, and its closure.
        node: the autograd node that ran the latest op; None once the node is done.
        outputs: the gradients that this node returned.
        done: name and sequence number of the node that ran the latest op, once the node is done.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[ModulePlace | None, bool, int]] = []
        self.optimizer: tuple[CodeType | None, CodeType | None] | None = None
        self.node: Any = None
        self.outputs: list[Value | None] = []
        self.done: tuple[str, int] | None = None


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every op of the threads that it is entered in, their backwards included.

    Args:
        on_event: called after each op, with the event and the tensors of its operands. The op may
            have written to these tensors.

    Attributes:
        is_idle: ops run as usual, and are not noted.
        step: number of the step that runs.
        forward: by thread and sequence number of an autograd node, the forward op that created it.
        thread: what runs in this thread.
        count: how many ops ran.
    """

    supports_higher_order_operators = True

    def __init__(self, on_event: Callable[[Event, list[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_idle = False
        self.step = 0
        self.forward: dict[tuple[int, int], Event] = {}
        self.thread = _Thread()
        self.count = 0
        self._values: dict[int, Value] = {}  # by id(tensor)
        # By address of a storage that was written through x.data, which does not change the version
        # count of x: the number of the latest op that wrote it.
        self._written: dict[int, int] = {}
        self._has_zeros = False  # tensors of zeros without memory
        self._on_event = on_event

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs one op, and scans what it returned."""
        if kwargs is None:
            kwargs = {}
        info = _infos.get(id(func))
        if info is None:
            info = _infos[id(func)] = OpInfo(func)
        if info.ignored or self.is_idle:
            return func(*args, **kwargs)
        self.count += 1
        event = Event(self.count, self.step, info)
        taken, written = self._take(event, info, args, kwargs)
        if self._has_zeros and not info.is_view and info.name not in _ZERO_AWARE:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _with_memory, (args, kwargs))
        out = func(*args, **kwargs)
        self._has_zeros |= info.name == _ZEROS
        self._note_place(event)
        self._note_results(event, info, written, out)
        self._on_event(event, taken)
        return out

    @staticmethod
    def is_in_backward() -> bool:
        """Whether a backward runs in this thread."""
        return _node() is not None

    def settle(self, most: int) -> None:
        """Forgets tensors that are gone, and old forward ops.

        Args:
            most: how many forward ops may be kept; beyond that, half of them are.
        """
        self._values = {
            key: value
            for key, value in self._values.items()
            if (tensor := value.ref()) is not None and not self._is_outdated(value, tensor)
        }
        self._written.clear()
        if len(self.forward) > most:
            self.forward = dict(list(self.forward.items())[-most // 2 :])

    # -- values ----------------------------------------------------------------------------------

    def value(self, tensor: torch.Tensor) -> Value | None:
        """What a tensor holds; None where it was never seen, or was changed by code not seen."""
        value = self._latest(tensor)
        if value is None:
            return None
        try:
            is_same = tensor._version in value.versions and tensor.data_ptr() == value.address  # noqa: SLF001
        except RuntimeError:  # as in state_of
            return None
        return None if not is_same or self._is_outdated(value, tensor) else value

    def _latest(self, tensor: torch.Tensor) -> Value | None:
        """What a tensor held when it was last seen; None where it never was."""
        value = self._values.get(id(tensor))
        return value if value is not None and value.ref() is tensor else None

    def _is_outdated(self, value: Value, tensor: torch.Tensor) -> bool:
        """Whether its memory was written since without a change of its version count."""
        return bool(self._written) and value.number < self._written.get(storage_of(tensor), 0)

    def read(self, tensor: torch.Tensor) -> Value:
        """What a tensor holds. Scans the tensor if that is not known."""
        value = self.value(tensor)
        if value is not None and not value.is_unread:
            return value
        old = self._latest(tensor)
        value = self._values[id(tensor)] = Value(tensor, None, scan_of(tensor), self.count)
        if old is not None:
            value.allocated_by, value.base = old.allocated_by, old.base
            value.has_own_version = old.has_own_version
            if old.is_unread and value.versions[0] in old.versions:
                value.maker = old.maker
            elif value.versions[0] < 0:  # an inference tensor: most likely nothing wrote it
                value.maker, value.base = old.maker, old.base or old
                value.bad_view = old.bad_view or old
            else:
                old.is_consumed = True  # it is overwritten: nothing of it is left
                value.is_rewritten = True
                value.bad_view = (old.base or old).bad_view
        return value

    def _note_write(self, tensor: torch.Tensor, info: OpInfo) -> None:
        """Notes that an op is about to write a tensor, which may be the `.data` of another one."""
        known = self._latest(tensor)
        has_own_version = known is None or known.has_own_version or info.late
        if has_own_version or self._written:
            storage = storage_of(tensor)
            if has_own_version or storage in self._written:
                self._written[storage] = self.count

    def _take(
        self, event: Event, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
        """Notes the operands of an op that is about to run.

        Returns:
            The tensors of `event.operands`, and those it is about to write, by argument.
        """
        taken: list[torch.Tensor] = []
        written: list[tuple[str, torch.Tensor]] = []
        given = zip(info.arguments, args, strict=False)
        for argument, x in (*given, *kwargs.items()) if kwargs else given:
            tensors = _named_tensors(argument, x)
            if not tensors:
                event.settings[argument] = x
            for name, tensor in tensors if info.reads else ():
                if argument in info.written:
                    written.append((argument, tensor))
                    if argument in info.overwrites:
                        continue
                value = self.value(tensor)
                if value is None or value.is_unread:
                    # The version of an inference tensor is not known: no write to it has been seen.
                    known = value or self._latest(tensor)
                    if argument in info.fills and known is not None and known.is_unread:
                        continue
                    if value is None or not info.is_view:
                        value = self.read(tensor)
                event.operands.append((name, value))
                taken.append(tensor)
        for _, tensor in written:
            self._note_write(tensor, info)
        return taken, written

    def _note_results(
        self, event: Event, info: OpInfo, written: list[tuple[str, torch.Tensor]], out: Any
    ) -> None:
        for argument, tensor in written:
            event.results.append(self._rewritten(event, info, argument, tensor))
        for x in (out,) if isinstance(out, torch.Tensor) else _flat(out):
            if written and any(x is tensor for _, tensor in written):
                continue
            value = self.value(x)
            if value is None:
                value = self._values[id(x)] = self._new(event, info, x)
            event.results.append(value)

    def _rewritten(self, event: Event, info: OpInfo, argument: str, tensor: torch.Tensor) -> Value:
        old = self._latest(tensor)
        if argument in info.fills and info.late:
            value = Value(tensor, event, None, event.number)
            value.allocated_by = event
        elif argument in info.fills and old is not None and old.is_unread:
            value = Value(tensor, event, None, event.number)
            value.allocated_by = old.allocated_by
        else:
            value = Value(tensor, event, None if info.empty else scan_of(tensor), event.number)
            value.allocated_by = event if info.empty else None
        if old is not None and old.base is not None:
            value.base, value.has_own_version = old.base, old.has_own_version
            if isinstance(value.row, _C.PendingScan) or value.is_bad:
                value.base.bad_view = value
        if value.versions[0] >= 0:
            value.versions = value.versions[0], value.versions[0] + 1
        self._values[id(tensor)] = value
        return value

    def _new(self, event: Event, info: OpInfo, x: torch.Tensor) -> Value:
        if info.empty or info.late:
            value = Value(x, event, None, event.number)
            value.allocated_by = event
        elif info.is_view and event.operands:
            base = event.operands[0][1]
            is_whole = shape_of(x).numel() == base.shape.numel()
            row = base.row if is_whole or base.is_unread else scan_of(x)
            value = Value(x, base.maker, row, event.number)
            value.allocated_by, value.taint = base.allocated_by, base.taint
            value.is_rewritten = base.is_rewritten
            value.base = base.base or base
            value.has_own_version = base.has_own_version or info.name == _DETACH
            value.versions += base.versions  # torch makes them share a version count after the op
        else:
            value = Value(x, event, scan_of(x), event.number)
        return value

    # -- places ----------------------------------------------------------------------------------

    def _note_place(self, event: Event) -> None:
        thread = self.thread
        node = _node()
        here = sys._getframe(2)  # noqa: SLF001 - on a path where inspect is too slow
        if thread.optimizer is not None and not thread.modules and node is None:
            caller, closure = thread.optimizer
            event.in_optimizer = closure is None or not is_called_by(closure, caller, here)
        if thread.modules:
            event.place, event.recomputed, event.call = thread.modules[-1]
        if node is None or event.recomputed:
            frame = user_frame(here)
        else:
            frame, event.recomputed = user_frame_in_backward(here)
        if node is not None and not event.recomputed:
            event.node = node.name(), node._sequence_nr()  # noqa: SLF001 - no public spelling
            event.outputs = self._outputs_of(node, event)
            if frame is None and event.node[0] == _LEAF:  # this node has no forward op
                frame = user_frame(here)
        else:
            thread.done = None
        if not event.in_optimizer and (event.node is None or torch.is_grad_enabled()):
            self._note_forward(event)
        if frame is not None:
            event.code, event.line = frame.f_code, frame.f_lineno

    def _note_forward(self, event: Event) -> None:
        """Notes an op as the one that created the latest autograd node.

        That is the first op after the node was created, or the second where the first is the clone
        that an op in place makes of what it overwrites.
        """
        key = threading.get_ident(), _sequence_number() - 1
        known = self.forward.get(key)
        if known is None or (event.info.written and known.info.name == "aten.clone.default"):
            self.forward[key] = event

    def _outputs_of(self, node: Any, event: Event) -> list[Value | None] | None:
        """The list that gets the gradients of a node when the node is done.

        None where the op only sums gradients: after a node is done, or before another one begins.
        """
        thread, name = self.thread, event.node
        if thread.done == name:
            return None
        if thread.node is not node:
            if event.info.name in _SUMS:
                return None
            outputs: list[Value | None] = []

            def done(gradients: Any, _: Any) -> None:
                handle.remove()
                thread.node, thread.done = None, name
                outputs.extend(None if g is None else self._gradient(g) for g in gradients)

            handle = node.register_hook(done)
            thread.node, thread.outputs, thread.done = node, outputs, None
        return thread.outputs

    def _gradient(self, gradient: torch.Tensor) -> Value:
        while is_functorch_wrapped_tensor(gradient):
            gradient = get_unwrapped(gradient)
        return self.value(gradient) or self.read(gradient)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._is_zerotensor() else tensor  # noqa: SLF001 - as above


def _named_tensors(argument: str, x: Any) -> tuple[tuple[str, torch.Tensor], ...]:
    """The tensors of one argument, with names such as "self" and "tensors[3]"."""
    if isinstance(x, torch.Tensor):
        return ((argument, x),)
    if isinstance(x, (list, tuple)) and x and not isinstance(x[0], _NUMBERS):
        return tuple(
            named for i, t in enumerate(x) for named in _named_tensors(f"{argument}[{i}]", t)
        )
    return ()


def _flat(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, (list, tuple)):
        for x in out:
            if isinstance(x, torch.Tensor):
                yield x
            elif isinstance(x, (list, tuple)):
                yield from _flat(x)
