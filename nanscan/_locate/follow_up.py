"""After a finding: the next steps run op by op until the op is known that makes the bad values."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from nanscan._collect.names import Registry
from nanscan._data.finding import Finding
from nanscan._data.location import Location
from nanscan._locate.search import Locating, can_search, clear_away

_STEPS = 16  # to search, before it is given up
_ALL_STEPS = 4 * _STEPS  # of all searches, and then one step in so many
_ONE_IN = 50

_logger = logging.getLogger("nanscan")


class FollowUp:
    """Searches the steps after a finding.

    Args:
        registry: names of modules and parameters.
        on_located: called with the finding once its `location` is known.
    """

    def __init__(self, registry: Registry, on_located: Callable[[Finding, Location], None]) -> None:
        self._registry = registry
        self._on_located = on_located
        self._finding: Finding | None = None
        self._search: Locating | None = None
        self._thread: threading.Thread | None = None
        self._left = 0
        self._is_late = False  # a search could not begin when the last step ended
        self._searched = 0  # steps, ever

    def want(self, finding: Finding) -> None:
        """The next steps are to be searched for the cause of this finding."""
        if self._finding is None and self._searched < _ALL_STEPS + finding.step // _ONE_IN:
            self._finding, self._left = finding, _STEPS

    def on_step_end(self, step: int, *, before_forward: bool) -> None:
        """Between two steps: begins a search that is wanted, ends one that is over.

        Args:
            step: number of the one that comes.
        """
        clear_away()
        if self._search is None:
            # A mode that is entered in inference mode would be gone after it.
            self._is_late = torch.is_inference_mode_enabled()
            if not self._is_late:
                self._begin(step)
        elif self._thread is threading.current_thread():
            self._left -= 1
            self._searched += 1
            if self._search.location is not None or self._left <= 0:
                self.stop()
            elif torch.is_inference_mode_enabled():
                self._search.suspend()
        elif self._thread is not None and not self._thread.is_alive():
            finding, self._finding = self._finding, None
            self.stop()
            self._finding = finding  # for a search in this thread

    def on_before_forward(self, step: int) -> None:
        clear_away()
        if self._search is None and self._is_late:
            self._begin(step)
        if self._search is not None and self._thread is threading.current_thread():
            self._search.resume(is_new=False)

    def _begin(self, step: int) -> None:
        if self._finding is not None:
            self._is_late = not can_search()
            if not self._is_late:
                self._search = Locating(self._registry, self._located, step)
                self._thread = threading.current_thread()
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
            self._on_located(self._finding, location)
