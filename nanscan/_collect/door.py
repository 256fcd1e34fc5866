"""Where module calls are seen: at the door, or by hooks where torch has no door.

The door is a descriptor on `nn.Module._compiled_call_impl`, see csrc/door.h. It is there while
somebody observes module calls, and `nn.Module` is as torch made it otherwise.
"""

from __future__ import annotations

import logging
import threading
from types import CodeType, FunctionType

from torch import nn

from nanscan import _C
from nanscan._collect.module_hooks import ModuleHooks

_SLOT = "_compiled_call_impl"  # None in nn.Module; what Module.compile() sets in a module

_logger = logging.getLogger("nanscan")
_lock = threading.Lock()
_observers: list[_C.CallObserver] = []
_hooks = ModuleHooks()


def observe(observer: _C.CallObserver, owner: object) -> None:
    """Tells an observer of each module call of the process from now on.

    Args:
        observer: hears of calls, beside those that observe already.
        owner: the Python object that keeps it alive.
    """
    with _lock:
        if not _observers:
            _open()
        _observers.append(observer)
        _C.add_observer(observer, owner)


def forget(observer: _C.CallObserver) -> None:
    """Ends that; does nothing if it does not observe."""
    with _lock:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                _close()
            _C.remove_observer(observer)


def _open() -> None:
    code = _asking_code()
    if code is None:
        _hooks.attach()
        _logger.warning(
            "nanscan: this torch does not ask %s at each module call, or other code has set it: "
            "hooks see module calls instead, and cost more",
            _SLOT,
        )
    else:
        setattr(nn.Module, _SLOT, _C.make_door(nn.Module, code))


def _close() -> None:
    _hooks.detach()
    # Other code may have put its own value there meanwhile, which stays.
    if type(vars(nn.Module).get(_SLOT)).__name__ == "Door":
        setattr(nn.Module, _SLOT, None)


def _asking_code() -> CodeType | None:
    """The code of `nn.Module.__call__`, if it asks for the attribute and nobody has set that."""
    call: FunctionType | None = getattr(nn.Module, "_wrapped_call_impl", None)
    if call is None or _SLOT not in call.__code__.co_names:
        return None
    return call.__code__ if vars(nn.Module).get(_SLOT, call) is None else None
