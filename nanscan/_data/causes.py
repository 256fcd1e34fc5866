"""Causes that both rules of findings and rules of locations name: one title, one remedy each."""

from __future__ import annotations

import math

from nanscan._data.cause import Cause
from nanscan._data.settings import BadSetting
from nanscan._data.text import plural

UNMASK = (
    "scores.masked_fill(~mask, torch.finfo(scores.dtype).min) in the place of -inf; or let padded "
    "rows see one key and drop them later; F.scaled_dot_product_attention returns 0 for such rows"
)


def masked_rows(evidence: str, count: int, of: str = "the softmax", remedy: str = UNMASK) -> Cause:
    """A softmax has rows that hold nothing but -Inf.

    Args:
        evidence: the numbers.
        count: how many rows.
        of: what, with its article.
        remedy: what to write instead.
    """
    verb = "is" if count == 1 else "are"
    return Cause(f"{plural(count, 'row')} of {of} {verb} fully masked", evidence, remedy)


def zero_variance(evidence: str, layer: str, eps: float, dtype: str = "") -> Cause:
    """A normalisation divides by a standard deviation of 0.

    Args:
        evidence: the numbers.
        layer: the layer or function.
        eps: its eps.
        dtype: in which that rounds to 0; "": it is 0 itself, or its dtype is not known.
    """
    why = f": its eps={eps:g} is 0 in {dtype}" if dtype and eps else f" with eps {eps:g}"
    return Cause(
        f"{layer} divides by a variance of 0{why}",
        evidence,
        f"{layer}(..., eps=1e-5)",
    )


def second_moment_overflow(
    evidence: str, dtype: str, optimizer: str = "the optimizer", moment: str = "second moment"
) -> Cause:
    """An optimizer keeps squares of gradients in a dtype that cannot hold them.

    Args:
        evidence: the numbers.
        dtype: of the moment.
        optimizer: which one.
        moment: its name in the optimizer's state.
    """
    clip = "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)"
    wider = "keep parameters in float32: model.float(), and torch.autocast; or "
    return Cause(
        f"{optimizer}'s {moment} overflows {dtype}: the gradient's square does not fit",
        evidence,
        (wider if dtype == "float16" else "") + clip,
    )


def undefined_derivative(
    evidence: str, function: str = "", at: str = "", remedy: str = ""
) -> Cause:
    """A function is finite, and its derivative is not.

    Args:
        evidence: the numbers.
        function: which one; "": not known.
        at: the values at which it is not finite; "": not known.
        remedy: what to write instead; "": not known.
    """
    title = f"the derivative of {function} is not finite" + (f" at {at}" if at else "")
    unknown = "a derivative is not finite: it is undefined there, or too large"
    return Cause(title if function else unknown, evidence, remedy)


def empty_mean(evidence: str, *, of_labels: bool = False, remedy: str = "") -> Cause:
    """A mean has nothing to average over.

    Args:
        evidence: the numbers.
        of_labels: it is a loss, and no label counts.
        remedy: what to write instead; "": the usual.
    """
    if of_labels:
        return Cause(
            "a mean over nothing, 0 / 0: every label is ignored or has weight 0",
            evidence,
            remedy or "skip such a batch: if (labels != ignore_index).any()",
        )
    return Cause(
        "a mean over nothing, 0 / 0", evidence, "skip it: x.mean() if x.numel() else x.sum()"
    )


def setting_not_finite(setting: BadSetting, made: str) -> Cause:
    """A learning rate or the like is Inf or NaN.

    Args:
        setting: it.
        made: what it made bad.
    """
    began, where = setting.began, setting.where
    so = f"; a scheduler began with {began:g}" if began is not None else ""
    finite = f"{began:g}" if began is not None and math.isfinite(began) else "a finite value"
    return Cause(
        f"{setting.what} is not finite: {setting.optimizer} has {setting.name}={setting.value:g}",
        f"{where} is {setting.value:g} in the step that made {made} bad{so}",
        f"optimizer.{where} = {finite}, where it is set: in {setting.optimizer}(...), by a "
        "scheduler or by hand",
    )
