"""What is done about a bad step beyond telling: the optimizer does not take it, and it is saved.

An optimizer is kept from a step by calling it with a stand-in for itself, a shallow copy that has
no parameter groups. So nothing of the user's is changed, and nothing has to be put back, whatever
raises on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, Optimizer

from nanscan._sites import Kind, ModulePlace, Place, Registry, Site
from nanscan._tensors import plain_parts

if TYPE_CHECKING:
    from nanscan._judge import Finding

_logger = logging.getLogger("nanscan")

# -- steps that are not taken ----------------------------------------------------------------------

Gradients = list[tuple[torch.Tensor, Site]]
Look = Callable[[], tuple[Gradients, bool]]
Decision = bool | torch.Tensor  # whether to skip; a tensor: only the device knows

_BEFORE = "_nanscan_before"  # a stand-in's attributes as they were; only stand-ins have it
_OURS = ("param_groups", "found_inf")  # the attributes that a stand-in may have of its own
_NORMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Skipper:
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
        closure = _closure(args, kwargs)
        if closure is None:
            decision = self._decide(optimizer, *look())
            if decision is False:
                return None
            stand_in = _stand_in(args[0])
            _settle(stand_in, decision)
            return (stand_in, *args[1:]), kwargs
        if isinstance(optimizer, LBFGS):
            undo = _Undo(optimizer)
            looking = _Closure(
                closure, lambda: undo.note(bad=bool(self._decide(optimizer, *look()))), undo=undo
            )
            return _with_closure(args, kwargs, looking)
        stand_in = _stand_in(args[0])
        looking = _Closure(
            closure,
            lambda: _settle(stand_in, self._decide(optimizer, *look())),
            begin=lambda: _reset(stand_in),
        )
        return _with_closure((stand_in, *args[1:]), kwargs, looking)

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step returned: gives the optimizer what the step set on its stand-in."""
        closure = _closure(args, kwargs)
        while isinstance(closure, _Closure):
            if closure.undo is not None:
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
            for gradient, site in gradients
            if not (host_is_fine and _is_on_host(gradient))
            and not self._ignores(site, gradient.dtype)
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


# -- closures --------------------------------------------------------------------------------------


class _Closure:
    """A closure that looks at the gradients it made.

    Args:
        inner: the closure.
        on_gradients: called after it.
        begin: called before it.
        undo: takes back what happens between its calls.
    """

    def __init__(
        self,
        inner: Callable[[], Any],
        on_gradients: Callable[[], None],
        *,
        begin: Callable[[], None] = lambda: None,
        undo: _Undo | None = None,
    ) -> None:
        self.inner = inner
        self.undo = undo
        self._begin = begin
        self._on_gradients = on_gradients

    def __call__(self) -> Any:
        self._begin()
        loss = self.inner()
        self._on_gradients()
        return loss


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: _Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


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


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


# -- steps that are saved --------------------------------------------------------------------------

_MAX_SAVES = 3  # of one run
_MAX_CALLS = 8  # outermost modules of one step whose last call is kept
_MAX_DEPTH = 16  # of nested containers
_MAX_STATE_BYTES = 1 << 30
_CALL_FILE, _STATE_FILE, _TEXT_FILE = "call.pt", "state_dict.pt", "finding.txt"

# What torch.load takes with weights_only=True, tensors and containers aside.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {torch.dtype, torch.device, torch.layout, torch.Size}
)
_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass
class _Kept:
    """A tensor that went into a call, with its version then; None: torch counts none for it."""

    tensor: torch.Tensor
    version: int | None
    path: str


@dataclass
class Call:
    """How a call of an outermost module began.

    Attributes:
        module: the module.
        args: positional arguments; containers are copies, with each tensor in a `_Kept`.
        kwargs: keyword arguments.
        rng: states of random number generators.
        autocast: dtype by type of device, where autocast was on.
        notes: what is special about arguments, by path.
        steps: how many steps optimizers had taken.
    """

    module: weakref.ref[nn.Module]
    args: Any
    kwargs: Any
    rng: dict[str, Any]
    autocast: dict[str, torch.dtype]
    notes: dict[str, str]
    steps: int


class Saver:
    """Keeps how calls began, and writes one down when its step was bad.

    Args:
        folder: where to; made when first needed.
        registry: places of modules.
    """

    def __init__(self, folder: Path, registry: Registry) -> None:
        self._folder = folder
        self._registry = registry
        self._calls: dict[int, Call] = {}  # by id(module), latest last
        self.steps = 0  # of optimizers
        self._left = _MAX_SAVES
        self._warned = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """The last call of each outermost module in this step."""
        return tuple(self._calls.values())

    def knows(self, module: nn.Module) -> bool:
        """Whether an earlier call of a module in this step would be forgotten for the next."""
        return id(module) in self._calls

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is about to run. Never raises."""
        if self._left == 0:
            return
        self._calls.pop(id(module), None)
        notes: dict[str, str] = {}
        with self._troubles("keep the inputs of a step"):
            self._calls[id(module)] = Call(
                weakref.ref(module),
                _structure(args, "args", notes),
                _structure(kwargs, "kwargs", notes),
                _rng_states(),
                {
                    kind: torch.get_autocast_dtype(kind)
                    for kind in ("cpu", "cuda")
                    if torch.is_autocast_enabled(kind)
                },
                notes,
                self.steps,
            )
        while len(self._calls) > _MAX_CALLS:
            del self._calls[next(iter(self._calls))]

    def forget(self) -> None:
        """The step is over."""
        self._calls.clear()

    def save(self, finding: Finding, place: Place | None, calls: tuple[Call, ...]) -> None:
        """Writes down a bad step. Never raises.

        Args:
            finding: what was found.
            place: where.
            calls: of that step.
        """
        if self._left == 0:
            return
        self._left -= 1
        with self._troubles(f"save step {finding.step}"):
            target = self._write(finding, self._choose(place, calls))
            _logger.warning("nanscan: saved step %d to %s", finding.step, target)

    def _choose(self, place: Place | None, calls: tuple[Call, ...]) -> Call | None:
        """The last call of the outermost module in which something was found.

        Of any, where that belongs to no module, such as the loss. None where that call is not
        known, as when another thread ended the step in its midst.
        """
        for call in reversed(calls):
            root = self._registry.places.get(id(call.module()))
            if place is not None and root is not None and place.is_inside(root):
                return call
        while place is not None and place.parent is not None:
            place = place.parent
        return None if isinstance(place, ModulePlace) or not calls else calls[-1]

    def _write(self, finding: Finding, call: Call | None) -> Path:
        name = f"step-{finding.step}-rank-{finding.rank}"
        part = self._folder / f".{name}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            notes = (
                {"": "the call in which it was found is not known"} if call is None else call.notes
            )
            module = call.module() if call is not None else None
            state = None if module is None else _state(module, notes)
            if state is not None and call is not None and call.steps != self.steps:
                notes["state_dict"] = "as it was after the optimizer's step that followed the call"
            content = {
                "step": finding.step,
                "rank": finding.rank,
                "site": [finding.site.name, finding.site.kind, finding.site.path],
                "verdict": finding.verdict,
                "text": str(finding),
                "args": () if call is None else _content(call.args, notes),
                "kwargs": {} if call is None else _content(call.kwargs, notes),
                "rng": {} if call is None else _listed(call.rng),
                "autocast": {} if call is None else call.autocast,
                "training": {}
                if module is None
                else {key: child.training for key, child in module.named_modules()},
                "notes": notes,
                "versions": _versions(),
            }
            _save(content, part / _CALL_FILE)
            if state is not None:
                _save(state, part / _STATE_FILE)
            text = [content["text"], *(f"{path}: {note}" for path, note in notes.items()), ""]
            (part / _TEXT_FILE).write_text("\n".join(text), encoding="utf-8")
            for number in itertools.count(1):
                target = self._folder / (name if number == 1 else f"{name}-{number}")
                if not target.exists():
                    break
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target

    @contextlib.contextmanager
    def _troubles(self, what: str) -> Iterator[None]:
        """Logs the first error, and lets training go on after any."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a disk, a container of the user's, pickle, ...
            if not self._warned:
                self._warned = True
                inner = error.__context__  # torch hides why it could not write
                why = inner if isinstance(inner, OSError) else error
                _logger.warning("nanscan: could not %s: %s: %s", what, type(why).__name__, why)


def _structure(x: Any, path: str, notes: dict[str, str], depth: int = 0) -> Any:
    """Containers copied, tensors in a `_Kept`, and None for what cannot be loaded, with a note."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind in _TENSORS and not torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001
        return _Kept(x, None if x.is_inference() else x._version, path)  # noqa: SLF001
    if depth < _MAX_DEPTH:
        if isinstance(x, (tuple, list)):
            plain: Any = list if isinstance(x, list) else tuple
            if kind is not plain:
                notes[path] = f"a {_type_name(x)}, kept as a {plain.__name__}"
            return plain(
                _structure(item, f"{path}[{i}]", notes, depth + 1) for i, item in enumerate(x)
            )
        if isinstance(x, Mapping) and all(type(key) in _PLAIN for key in x):
            if kind not in (dict, OrderedDict):
                notes[path] = f"a {_type_name(x)}, kept as a dict"
            pairs = (
                (key, _structure(value, f"{path}[{key!r}]", notes, depth + 1))
                for key, value in x.items()
            )
            return OrderedDict(pairs) if kind is OrderedDict else dict(pairs)
    notes[path] = f"a {_type_name(x)}: left out"
    return None


def _content(x: Any, notes: dict[str, str], done: dict[int, torch.Tensor] | None = None) -> Any:
    """What `_structure` made, with tensors, and None for those that are not what they were."""
    done = {} if done is None else done
    if isinstance(x, (tuple, list)) and type(x) not in _PLAIN:
        return type(x)(_content(item, notes, done) for item in x)
    if isinstance(x, dict):
        return type(x)((key, _content(value, notes, done)) for key, value in x.items())
    if not isinstance(x, _Kept):
        return x
    if x.version is None:
        notes[x.path] = "an inference tensor: torch cannot tell whether it was changed since"
    elif x.version != x.tensor._version:  # noqa: SLF001
        notes[x.path] = "changed in place since the call began: left out"
        return None
    if id(x.tensor) not in done:
        done[id(x.tensor)] = _compact(x.tensor)
    return done[id(x.tensor)]


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:  # given the path alone, torch would not say what went wrong
        torch.save(content, file)


def _compact(x: torch.Tensor) -> torch.Tensor:
    """Without history, and without the rest of a storage that it is a part of."""
    plain = x.detach()
    if x.layout == torch.strided and not (x.is_nested or x.is_meta or x.is_quantized):
        if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
            plain = plain.clone()
        if x.requires_grad:
            plain.requires_grad_()
    return plain


def _state(module: nn.Module, notes: dict[str, str]) -> dict[str, Any] | None:
    """Parameters and persistent buffers under the names of state_dict(), which may do anything.

    With FSDP it would wait for other ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        stem = f"{prefix}." if prefix else ""
        for name, x in itertools.chain(child._parameters.items(), child._buffers.items()):  # noqa: SLF001
            if x is not None and name not in child._non_persistent_buffers_set:  # noqa: SLF001
                tensors[stem + name] = x
    size = sum({id(x): x.numel() * x.element_size() for x in tensors.values()}.values())
    if size > _MAX_STATE_BYTES:
        notes["state_dict"] = f"of {size:,} bytes: left out"
        return None
    done: dict[int, torch.Tensor] = {}
    state = {}
    for name, x in tensors.items():
        if type(x) not in _TENSORS:
            notes[f"state_dict[{name!r}]"] = f"a {_type_name(x)}: left out"
            continue
        if id(x) not in done:
            done[id(x)] = _compact(x)
        state[name] = done[id(x)].detach()
    return state


def _rng_states() -> dict[str, Any]:
    """Synchronization: none, the states of CUDA are on the host."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what users' code draws from
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_rng_states(),
        "python": random.getstate(),
        "numpy": numpy,
    }


def _cuda_rng_states() -> dict[int, torch.Tensor]:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not initialized or torch.cuda.is_current_stream_capturing():
        return {}
    return {i: torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}


def _listed(x: Any) -> Any:
    """With arrays as lists, which torch.load takes."""
    if isinstance(x, dict):
        return {key: _listed(value) for key, value in x.items()}
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


def _versions() -> dict[str, str]:
    from nanscan import __version__  # noqa: PLC0415 - the package imports this module

    return {"nanscan": __version__, "torch": str(torch.__version__)}


def _type_name(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


@dataclass
class Saved:
    """A bad step as `load_saved` returns it.

    Attributes:
        args: positional inputs of the outermost module's last call of that step, as they were
            before it; None where one was left out.
        kwargs: its keyword inputs.
        step: number of the step.
        rank: of the process.
        site: where it went bad.
        verdict: what it was.
        text: the report.
        rng: states of the random number generators before the call: "torch", "cuda" by index,
            "python" and "numpy".
        state_dict: parameters and buffers of the outermost module; None where they were left out.
        training: whether each of its modules was in training mode, by name.
        autocast: dtype by type of device, where autocast was on.
        notes: what was left out, changed or is otherwise not as it was, by path, such as
            "args[0]" or "state_dict".
        versions: of "nanscan" and "torch".
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: int
    rank: int
    site: Site
    verdict: str
    text: str
    rng: dict[str, Any] = field(repr=False)
    state_dict: dict[str, torch.Tensor] | None = field(repr=False)
    training: dict[str, bool] = field(repr=False)
    autocast: dict[str, torch.dtype]
    notes: dict[str, str]
    versions: dict[str, str]

    def restore_rng(self) -> None:
        """Sets the random number generators of this process to what they were before the call.

        Those of CUDA devices that are not there are left out.

        Raises:
            ValueError: the call is not known, so there are none.
        """
        if not self.rng:
            raise ValueError("nanscan: no states of random number generators were saved")
        torch.set_rng_state(self.rng["torch"].cpu())
        random.setstate(self.rng["python"])
        np.random.set_state(self.rng["numpy"])  # noqa: NPY002 - as above
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index, state in self.rng["cuda"].items():
            if index < devices:
                torch.cuda.set_rng_state(state.cpu(), index)


def load_saved(path: str | os.PathLike[str], map_location: Any = None) -> Saved:
    """Reads what `enable(..., save=folder)` wrote about a bad step.

    Args:
        path: its directory, such as "folder/step-812-rank-0".
        map_location: where tensors go, as for `torch.load`, which is called with
            weights_only=True.

    Returns:
        Inputs, parameters and states of random number generators with which to run the step again.

    Raises:
        FileNotFoundError: there is nothing of the kind.
    """
    folder = Path(path)
    if not (folder / _CALL_FILE).is_file():
        raise FileNotFoundError(f"nanscan: no saved step in {folder}")
    content = torch.load(folder / _CALL_FILE, map_location=map_location, weights_only=True)
    state = None
    if (folder / _STATE_FILE).is_file():
        state = torch.load(folder / _STATE_FILE, map_location=map_location, weights_only=True)
    name, kind, argument = content.pop("site")
    kind_: Kind = kind
    return Saved(site=Site(name, kind_, argument), state_dict=state, **content)
