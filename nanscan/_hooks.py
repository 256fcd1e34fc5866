"""What the hooks of a pickled model become. Files that users saved name this module and class."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Inert:
    """Stands in for hooks of nanscan in a model that was pickled while they were on it."""

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Does nothing."""

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Does nothing."""

    def leaf(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Does nothing."""
