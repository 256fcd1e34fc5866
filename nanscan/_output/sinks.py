"""Sinks: where findings go. Each action of `enable` is one; users may write their own."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Literal

from nanscan._data.errors import NonFiniteError, NonFiniteWarning
from nanscan._data.finding import Finding, Located
from nanscan._data.frames import is_installed, user_frame

_logger = logging.getLogger("nanscan")


class Sink:
    """Where a monitor's findings go. A subclass overrides what it needs.

    Sinks are called one at a time, in the training thread, between two steps. An error that a sink
    raises reaches the user's code.
    """

    def on_finding(self, finding: Finding) -> None:
        """Gets each fault that is news, and each finding that is not a fault."""

    def on_located(self, located: Located) -> None:
        """Gets the op behind a finding, found in a later step by `enable(locate=True)`."""

    def on_step(self, step: int) -> None:
        """Called once for each step, after it was judged and its findings were delivered.

        A probe outside of any module may follow a step of inference: it is judged after that.
        """

    def flush(self) -> None:
        """Writes everything that the sink has buffered."""

    def close(self) -> None:
        """Called when the monitor closes. No call follows."""


Named = Literal["warn", "raise", "log"]
Action = Named | Callable[[Finding | Located], object] | Sink


class _Standard(Sink):
    """Logs what is no fault. Subclasses say what happens to faults and locations."""

    def on_finding(self, finding: Finding) -> None:
        text = f"nanscan: {finding}"
        if finding.is_fault:
            self._on_fault(finding, text)
        elif finding.verdict in ("near-limit", "all-zero"):
            _logger.warning(text)
        else:
            _logger.info(text)

    def on_located(self, located: Located) -> None:
        warn(f"nanscan: {located}")

    def _on_fault(self, finding: Finding, text: str) -> None:
        """A fault that is news, and its report."""


class Warn(_Standard):
    """Emits a NonFiniteWarning for each fault."""

    def _on_fault(self, finding: Finding, text: str) -> None:
        warn(text)


class Raise(_Standard):
    """Raises a NonFiniteError for each new fault; warns of one that goes on, and of locations."""

    def _on_fault(self, finding: Finding, text: str) -> None:
        if finding.news == "again":
            warn(text)
        else:
            raise NonFiniteError(text, finding=finding)


class Log(_Standard):
    """Logs faults as errors to the logger "nanscan"."""

    def _on_fault(self, finding: Finding, text: str) -> None:
        _logger.error(text)

    def on_located(self, located: Located) -> None:
        """Logs it as an error, too."""
        _logger.error("nanscan: %s", located)


class Call(Sink):
    """Calls a function with each Finding and each Located."""

    def __init__(self, function: Callable[[Finding | Located], object]) -> None:
        self._function = function

    def on_finding(self, finding: Finding) -> None:
        """Calls the function."""
        self._function(finding)

    def on_located(self, located: Located) -> None:
        """Calls the function."""
        self._function(located)


_NAMED: dict[str, type[Sink]] = {"warn": Warn, "raise": Raise, "log": Log}


def sinks_of(action: Action | Iterable[Action]) -> list[Sink]:
    """The sinks that `action` of `enable` names; one that raises comes last.

    Args:
        action: "warn", "raise", "log", a callable, a Sink, or several of these.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(action, (str, Sink)) or callable(action) or not isinstance(action, Iterable):
        return [_sink_of(action)]
    found = [_sink_of(item) for item in action]
    return sorted(found, key=lambda sink: isinstance(sink, Raise))


def _sink_of(action: object) -> Sink:
    if isinstance(action, Sink):
        return action
    if isinstance(action, str) and action in _NAMED:
        return _NAMED[action]()
    if callable(action):
        return Call(action)
    raise ValueError(
        "nanscan: action must be 'warn', 'raise', 'log', a callable or a nanscan.Sink, got "
        f"{action!r}"
    )


def without_raising(sinks: Iterable[Sink]) -> list[Sink]:
    """The same sinks, with warnings in the place of errors."""
    return [Warn() if isinstance(sink, Raise) else sink for sink in sinks]


def warn(text: str) -> None:
    """Emits a warning that points at the innermost line of user code; logs one that is filtered.

    Python shows a warning of one text and line once, and none that a filter ignores. A second run
    in one process must not lose its fault, nor a run that silences all warnings.
    """
    frame, line = _user_line()
    file = frame.f_code.co_filename if frame else getattr(sys.modules["__main__"], "__file__", "")
    module = (frame.f_globals.get("__name__") if frame else "__main__") or "<unknown>"
    if _is_ignored(text, module, line):
        _logger.error(text)
        return
    warnings.warn_explicit(text, NonFiniteWarning, file, line, module=module, registry={})


def _user_line() -> tuple[FrameType | None, int]:
    """The innermost frame that belongs to no installed package, else to neither torch nor us.

    When the process ends, none runs: then the one in which it crashed, if it did.

    Returns:
        The frame, and its line; None and 0: there is none.
    """
    frame = user_frame(sys._getframe(1))  # noqa: SLF001
    if frame is not None:
        own: FrameType | None = frame
        while own is not None and is_installed(own.f_code.co_filename):
            own = own.f_back
        found = own or frame
        return found, found.f_lineno
    crash = list(traceback.walk_tb(getattr(sys, "last_traceback", None)))
    for frame, line in reversed(crash):
        if not is_installed(frame.f_code.co_filename):
            return frame, line
    return None, 0


def _is_ignored(text: str, module: str, line: int) -> bool:
    """Whether the first of Python's warning filters that matches says "ignore"."""
    for action, message, category, of_module, of_line in warnings.filters:
        if (
            (message is None or message.match(text))
            and issubclass(NonFiniteWarning, category)
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action == "ignore"
    return False
