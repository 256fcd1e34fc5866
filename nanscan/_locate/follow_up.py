"""After a finding, runs the next steps op by op, until the op that made the values is found."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from nanscan._collect.names import Registry
from nanscan._data.finding import Finding
from nanscan._data.location import Location
from nanscan._locate.dispatch_stack import can_search, clear_away
from nanscan._locate.search import Locating

_MAX_STEPS = 16  # of one search
_MAX_ALL_STEPS = 4 * _MAX_STEPS  # of all searches, and one more in so many steps of the run:
_ONE_MORE_IN = 50

_logger = logging.getLogger("nanscan")


class FollowUp:
    """Searches the steps after a finding.

    Args:
        registry: names of modules and parameters.
        on_located: called once with the finding and the op, when that is found.
    """

    def __init__(self, registry: Registry, on_located: Callable[[Finding, Location], None]) -> None:
        self._registry = registry
        self._on_located = on_located
        self._finding: Finding | None = None
        self._search: Locating | None = None
        self._thread: threading.Thread | None = None  # that is searched
        self._steps_left = 0  # of this search
        self._searched = 0  # steps of all searches
        self._step = 0  # that was searched last
        self._is_late = False  # the search could not begin when the last step ended

    def want(self, finding: Finding) -> None:
        """Asks for a search of the next steps; does nothing while there is one.

        Args:
            finding: what to find the op of.
        """
        may_search = self._searched < _MAX_ALL_STEPS + finding.step // _ONE_MORE_IN
        if self._finding is None and may_search:
            self._finding, self._steps_left = finding, _MAX_STEPS

    def on_step_end(self, step: int) -> None:
        """Between two steps: begins a search that is wanted, or ends one that is over.

        Args:
            step: number of the step that comes.
        """
        clear_away()
        if self._search is None:
            # A dispatch mode that is pushed in inference mode is forgotten when that ends.
            self._is_late = torch.is_inference_mode_enabled()
            if not self._is_late:
                self._begin(step)
        elif self._thread is threading.current_thread():
            is_over = step != self._step  # else another optimizer steps in it
            self._step = self._search.step = step
            self._steps_left -= is_over
            self._searched += is_over
            if self._search.location is not None or self._steps_left <= 0:
                self.stop()
            elif torch.is_inference_mode_enabled():
                self._search.suspend()
        elif self._thread is not None and not self._thread.is_alive():
            # This thread is searched instead when its next step ends.
            finding, self._finding = self._finding, None
            self.stop()
            self._finding = finding

    def on_before_forward(self, step: int) -> None:
        """An outermost module is about to run. In inference mode, only such calls are searched.

        Args:
            step: number of the step that this call belongs to.
        """
        clear_away()
        if self._search is None and self._is_late:
            self._begin(step)
        if self._search is not None and self._thread is threading.current_thread():
            self._search.resume()

    def stop(self) -> None:
        """Ends the search, whether the op is found or not."""
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

    def _begin(self, step: int) -> None:
        if self._finding is not None:
            self._is_late = not can_search()
            if not self._is_late:
                self._search = Locating(self._registry, self._on_location, step, is_follow_up=True)
                self._step = step
                self._thread = threading.current_thread()
                self._search.__enter__()

    def _on_location(self, location: Location) -> None:
        if self._finding is not None:
            self._on_located(self._finding, location)
