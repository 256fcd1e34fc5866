"""Steps that are saved for a replay: what went into the model, and the state of all randomness."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan._data.finding import Finding
from nanscan._data.kept import PLAIN, TENSORS, KeptCall, KeptTensor
from nanscan._data.places import ModulePlace, Place
from nanscan._data.site import Kind, Site
from nanscan._data.text import type_name
from nanscan._version import __version__

_logger = logging.getLogger("nanscan")


_MAX_SAVES = 3  # of one run
_MAX_STATE_BYTES = 1 << 30
_CALL_FILE, _STATE_FILE, _TEXT_FILE = "call.pt", "state_dict.pt", "finding.txt"


class Saver:
    """Writes down the first bad steps of a run.

    Args:
        folder: where to; made when first needed.
        steps: how many to write at most.
    """

    def __init__(self, folder: Path, steps: int = _MAX_SAVES) -> None:
        self._folder = folder
        self._left = steps
        self.latest: Path | None = None  # what was written last
        self._has_warned = False

    @property
    def is_done(self) -> bool:
        """Whether nothing more will be written."""
        return self._left == 0

    def save(self, finding: Finding, place: Place | None, calls: tuple[KeptCall, ...]) -> None:
        """Writes down a bad step. Never raises.

        Args:
            finding: what was found.
            place: where; None: in no place that is known.
            calls: of that step.

        Synchronization: waits for what it writes.
        """
        if self.is_done:
            return
        self._left -= 1
        with self._troubles(f"save step {finding.step}"):
            self.latest = self._write(finding, _choose(place, calls))
            _logger.warning("nanscan: saved step %d to %s", finding.step, self.latest)

    def _write(self, finding: Finding, call: KeptCall | None) -> Path:
        name = f"step-{finding.step}-rank-{finding.rank}"
        part = self._folder / f".{name}.{os.getpid()}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            unknown = {"": "the call in which it was found is not known"}
            notes = dict(unknown if call is None else call.notes)
            module = call.module() if call is not None else None
            state = None if module is None else _state(module, notes)
            if state is not None and call is not None and call.was_stepped():
                notes["state_dict"] = "as it was after the optimizer's step that followed the call"
            buffers = {} if call is None else _buffers_before(call, notes)
            if state is not None:
                state |= {name: x for name, x in buffers.items() if name in state}
            content = {
                "step": finding.step,
                "rank": finding.rank,
                "site": [finding.site.name, finding.site.kind.value, finding.site.path],
                "verdict": finding.verdict,
                "text": str(finding),
                "args": () if call is None else _content(call.args, notes),
                "kwargs": {} if call is None else _content(call.kwargs, notes),
                "buffers": {k: x for k, x in buffers.items() if state is None or k not in state},
                "attributes": {} if call is None else _content(dict(call.attributes), notes),
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
            if not self._has_warned:
                self._has_warned = True
                inner = error.__context__  # torch hides why it could not write
                why = inner if isinstance(inner, OSError) else error
                _logger.warning("nanscan: could not %s: %s: %s", what, type(why).__name__, why)


def _choose(place: Place | None, calls: tuple[KeptCall, ...]) -> KeptCall | None:
    """The last call of the outermost module in which something was found.

    Of any, where that belongs to no module, such as the loss. None where that call is not
    known, as when another thread ended the step in its midst.
    """
    for call in reversed(calls):
        if place is not None and call.place is not None and place.is_inside(call.place):
            return call
    while place is not None and place.parent is not None:
        place = place.parent
    return None if isinstance(place, ModulePlace) or not calls else calls[-1]


def _content(x: Any, notes: dict[str, str], done: dict[int, torch.Tensor] | None = None) -> Any:
    """What `_structure` made, with tensors, and None for those that are not what they were."""
    done = {} if done is None else done
    if isinstance(x, (tuple, list)) and type(x) not in PLAIN:
        return type(x)(_content(item, notes, done) for item in x)
    if isinstance(x, dict):
        return type(x)((key, _content(value, notes, done)) for key, value in x.items())
    if not isinstance(x, KeptTensor):
        return x
    if x.before is None:
        notes[x.path] = "changed in place since the call began: left out"
        return None
    if x.version < 0 and x.copy is None:
        notes[x.path] = "an inference tensor: torch cannot tell whether it was changed since"
    if id(x.tensor) not in done:
        done[id(x.tensor)] = _compact(x.before)
    return done[id(x.tensor)]


def _buffers_before(call: KeptCall, notes: dict[str, str]) -> dict[str, torch.Tensor]:
    """The buffers that may have changed in place since the call began, as they were before it."""
    before = {}
    for name, kept in call.buffers.items():
        if kept.before is None:
            notes[kept.path] = "changed in place since the call began: as it was afterwards"
        elif kept.before is not kept.tensor:
            before[name] = kept.before
    return before


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
        if type(x) not in TENSORS:
            notes[f"state_dict[{name!r}]"] = f"a {type_name(x)}: left out"
            continue
        if id(x) not in done:
            done[id(x)] = _compact(x)
        state[name] = done[id(x)].detach()
    return state


def _listed(x: Any) -> Any:
    """With arrays as lists, which torch.load takes."""
    if isinstance(x, dict):
        return {key: _listed(value) for key, value in x.items()}
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


def _versions() -> dict[str, str]:
    return {"nanscan": __version__, "torch": str(torch.__version__)}


@dataclass
class Saved:
    """A bad step as `load_saved` returns it.

    Attributes:
        args: positional inputs of the outermost module's last call of that step, as they were
            before it; None where one was left out.
        kwargs: its keyword inputs.
        step: number of the step.
        rank: of the process.
        site: the first bad site.
        verdict: the verdict of its finding.
        text: the report of its finding.
        buffers: buffers that no state_dict holds, and that the call changed, as they were before.
        rng: states of the random number generators before the call: "torch", "cuda" by index,
            "python" and "numpy".
        state_dict: parameters and buffers of the outermost module; None where they were left out.
        training: whether each of its modules was in training mode, by name.
        autocast: dtype by type of device, where autocast was on.
        notes: what was left out, changed or is otherwise not as it was, by path, such as
            "args[0]" or "state_dict".
        versions: of "nanscan" and "torch".
        attributes: what its modules held in plain attributes before the call, such as a KV cache,
            by the names of the module and of the attribute; None in the place of what was left out.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: int
    rank: int
    site: Site
    verdict: str
    text: str
    buffers: dict[str, torch.Tensor] = field(repr=False)
    rng: dict[str, Any] = field(repr=False)
    state_dict: dict[str, torch.Tensor] | None = field(repr=False)
    training: dict[str, bool] = field(repr=False)
    autocast: dict[str, torch.dtype]
    notes: dict[str, str]
    versions: dict[str, str]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def restore_rng(self) -> None:
        """Sets the random number generators of this process to what they were before the call.

        States of CUDA devices that this machine does not have are ignored.

        Raises:
            ValueError: the call was not known, so no states were saved.
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

    @property
    def missing(self) -> list[str]:
        """The paths of arguments and attributes that were left out."""
        return [
            path
            for path, note in self.notes.items()
            if note.endswith("left out") and not path.startswith("state_dict")
        ]

    def differing(self, model: nn.Module) -> list[str]:
        """Names of parameters and buffers by which a model cannot be the one that was saved.

        A buffer may come into being in a forward only.
        """
        state = self.state_dict or {}
        parameters, others = set(), set()
        for prefix, child in model.named_modules(remove_duplicate=False):
            stem = f"{prefix}." if prefix else ""
            others |= {stem + name for name in (*child._parameters, *child._buffers)}  # noqa: SLF001
            parameters |= {stem + k for k, x in child._parameters.items() if x is not None}  # noqa: SLF001
        missing = {x for x in parameters - state.keys() if f"state_dict[{x!r}]" not in self.notes}
        return sorted(missing | (state.keys() - others))


def load_saved(path: str | os.PathLike[str], map_location: Any = None) -> Saved:
    """Reads what `enable(..., save_dir=folder)` wrote about a bad step.

    Args:
        path: its directory, such as "folder/step-812-rank-0".
        map_location: where tensors go, as for `torch.load`, which is called with
            weights_only=True.

    Returns:
        Inputs, parameters and states of random number generators with which to run the step again.

    Raises:
        FileNotFoundError: the directory holds no saved step.
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
