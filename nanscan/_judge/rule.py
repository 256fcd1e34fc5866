"""The decorator of rules about findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nanscan._data.finding import Verdict
from nanscan._data.rules import Rule
from nanscan._data.site import Kind
from nanscan._judge.evidence import Evidence

_A = TypeVar("_A")


def rule(
    *,
    verdicts: tuple[Verdict, ...] = ("origin",),
    kinds: Callable[[Kind], bool] = lambda _kind: True,
) -> Callable[[Callable[[Evidence], _A | None]], Rule[Evidence, _A]]:
    """Makes a function a rule about findings.

    Args:
        verdicts: findings of other verdicts are no concern of the rule.
        kinds: says whether a kind of site is its concern.
    """

    def applies(evidence: Evidence) -> bool:
        return evidence.finding.verdict in verdicts and kinds(evidence.kind)

    return lambda function: Rule(function, applies)
