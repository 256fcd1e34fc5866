"""After a finding: the next steps run op by op until the op is known that makes the bad values."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from nanscan._judge import Finding
from nanscan._locate import Locating
from nanscan._location import Location
from nanscan._sites import Registry

_STEPS = 16  # to search, before it is given up

_logger = logging.getLogger("nanscan")


class Drill:
    """Searches the steps after a finding.

    Args:
        registry: names of modules and parameters.
        on_located: called with the finding once its `location` is known.
    """

    def __init__(self, registry: Registry, on_located: Callable[[Finding], None]) -> None:
        self._registry = registry
        self._on_located = on_located
        self._finding: Finding | None = None
        self._search: Locating | None = None
        self._thread = 0
        self._left = 0

    def want(self, finding: Finding) -> None:
        """The next steps are to be searched for the cause of this finding."""
        if self._finding is None:
            self._finding, self._left = finding, _STEPS

    def step_ended(self, step: int) -> None:
        """Between two steps: begins a search that is wanted, ends one that is over.

        Args:
            step: number of the one that comes.
        """
        if self._search is not None:
            if threading.get_ident() != self._thread:
                return
            self._left -= 1
            if self._search.location is not None or self._left <= 0:
                self.stop()
        # A mode that is entered within another must leave before it, and who knows when that does.
        elif self._finding is not None and torch._C._len_torch_dispatch_stack() == 0:  # noqa: SLF001
            self._search = Locating(self._registry, self._located, step)
            self._thread = threading.get_ident()
            self._search.__enter__()

    def stop(self) -> None:
        """Ends the search, found or not."""
        search, finding = self._search, self._finding
        self._search = self._finding = None
        if search is not None:
            search.__exit__(None, None, None)
            if search.location is None and finding is not None:
                _logger.info(
                    "nanscan: searched the steps after step %d op by op; none made a non-finite "
                    "value",
                    finding.step,
                )

    def _located(self, location: Location) -> None:
        if self._finding is not None:
            self._finding.location = location
            self._on_located(self._finding)
