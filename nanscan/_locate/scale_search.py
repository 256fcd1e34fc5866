"""Tells the overflows of a GradScaler's search for its scale from faults."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanscan._data.location import Op
from nanscan._locate.causes.bounds import overflows
from nanscan._locate.causes.op_call import call_of
from nanscan._locate.causes.singularities import domain_of
from nanscan._locate.taint import Taint
from nanscan._locate.values import Event


def is_scale_search(taint: Taint, scale: float, op_of: Callable[[Event], Op]) -> bool:
    """Whether values came of a loss scale that was too large, so that a lower one is the answer.

    They overflowed float16 in backward, under a scale above 1. What would be bad at any scale, such
    as a division by 0, is no such search.

    Args:
        taint: the values.
        scale: by which the GradScaler had multiplied the loss.
        op_of: what a report knows of an op.
    """
    event = taint.event
    if scale <= 1 or taint.source not in ("made", "negative-inf") or event.node is None:
        return False
    bad = [value for value in event.results if value.is_bad]
    if not bad or any(value.dtype != torch.float16 for value in bad):
        return False
    call = call_of(op_of(event))
    if overflows(call):
        return True
    has_nan = any(operand.stats is not None and operand.stats.nan_count for operand in call.results)
    found = domain_of(call)
    return not has_nan and (found is None or not found.outside(call.tensors.get(found.argument)))
