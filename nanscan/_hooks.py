"""What hooks of older versions become in a loaded model: files that users saved name this class."""

from __future__ import annotations

from typing import Any


class _Inert:
    """Does nothing as a hook before a module call, after it, or both."""

    def before(self, *_call: Any, **_keywords: Any) -> None:
        """Does nothing."""

    after = leaf = before
