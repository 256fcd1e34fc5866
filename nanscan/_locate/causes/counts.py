"""Rules about how many values there are: means of none, and variances of one or of equal values."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from nanscan._data import causes
from nanscan._data.cause import Cause
from nanscan._data.text import plural
from nanscan._locate.causes.evidence import OpEvidence, rule
from nanscan._locate.causes.op_call import OpCall, numel
from nanscan._locate.causes.wording import named

_VARIANCES = ("var", "std", "var_mean", "std_mean")
_NLL_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_MEAN = 1  # torch's number of reduction="mean"
_MEANS = ("mean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


# Too few values ---------------------------------------------------------------------------------


@rule(functions=_VARIANCES, of_forward=True)
def variance_of_too_few(evidence: OpEvidence) -> Cause | None:
    """A variance divides by count - correction, which is 0 or less."""
    call = evidence.forward_call
    if (count := call.reduced) is None:
        return None
    correction = call.number("correction")
    if correction is None:
        correction = 0.0 if call.settings.get("unbiased") is False else 1.0
    if count > correction:
        return None
    return Cause(
        "variance of a single value" if count == 1 else f"variance of {count} values",
        f"{call.function} of {list(call.tensors['self'].shape)} takes {plural(count, 'value')} an "
        f"element, and divides by {count} - {correction:g} = {count - correction:g}",
        f"skip what has fewer than {correction + 1:g} values: x.{call.function}(dim) if "
        f"x.shape[dim] > {correction:g} else x.sum(dim) * 0",
    )


@rule(functions=_MEANS)
def mean_of_nothing(evidence: OpEvidence) -> Cause | None:
    """A mean, or a loss that takes one, has no element."""
    call = evidence.call
    given = call.tensors.get("self")
    if given is None or numel(given) or call.number("reduction") not in (None, _MEAN):
        return None
    return causes.empty_mean(
        f"{call.function} of {named(given)} of shape {list(given.shape)}, which has no element"
    )


@rule(functions=_NLL_LOSSES, of_forward=True)
def all_labels_ignored(evidence: OpEvidence) -> Cause | None:
    """A mean loss divides by the total weight of the labels, which is 0."""
    call = evidence.forward_call
    weight = call.results[1].stats if len(call.results) > 1 else None
    if call.number("reduction") != _MEAN:
        return None
    if weight is None or weight.min != 0 or weight.max != 0:
        return None
    labels = numel(call.tensors.get("target"))
    weights = call.stats("weight")
    remedy = (
        "skip such a batch: if (labels != ignore_index).any(); or F.cross_entropy(x, y, "
        "ignore_index=i, reduction='sum') / (y != i).sum().clamp(min=1)"
    )
    why = f"each is {call.settings.get('ignore_index')}, the ignore_index"
    if weights is not None:
        why += f", or of a class whose weight is 0 (weights are {weights.min:g} to {weights.max:g})"
        remedy = "skip such a batch: if weight[y[y != ignore_index]].sum() > 0"
    return causes.empty_mean(
        f"the {labels:,} labels have a total weight of 0: {why}", of_labels=True, remedy=remedy
    )


@rule(functions=("_ctc_loss",))
def ctc_target_too_long(evidence: OpEvidence) -> Cause | None:
    """A CTC loss of finite log probabilities is Inf only where no alignment exists."""
    call = evidence.call
    made = call.results[0].stats if call.results else None
    if made is None or not made.posinf_count or call.has_bad_argument:
        return None
    samples = _ctc_samples(call)
    if samples and not any(frames < labels + equal for frames, labels, equal in samples):
        return None  # a probability of 0
    short = next((s for s in samples if s[0] < s[1] + s[2]), None)
    lengths, title = "; between equal labels it takes a frame more", "longer than its input"
    if short is not None:
        frames, labels, equal = short
        lengths = f", such as one of {frames} frames for {labels} labels"
        if equal:
            lengths += f" and a frame more between each of {plural(equal, 'pair')} of equal labels"
        if frames >= labels:
            title = "too long for its input, since equal labels take a frame between them"
    return Cause(
        f"CTC: a target is {title}, which no alignment can give",
        f"the loss is Inf in {made.posinf_count:,} of {made.numel:,} samples{lengths}",
        "drop such samples, or F.ctc_loss(..., zero_infinity=True)",
    )


def _ctc_samples(call: OpCall) -> list[tuple[int, int, int]]:
    """Of each sample how many frames, labels and pairs of equal labels; [] where unknown."""
    given, wanted = (_integers(call, name) for name in ("input_lengths", "target_lengths"))
    targets = call.tensors.get("targets")
    if not given or len(given) != len(wanted):
        return []
    numbers, samples, start = targets.numbers if targets is not None else (), [], 0
    width = targets.shape[-1] if targets is not None and len(targets.shape) > 1 else 0
    for i, (frames, labels) in enumerate(zip(given, wanted, strict=True)):
        start = i * width if width else start
        label = numbers[start : start + labels]
        samples.append((frames, labels, sum(a == b for a, b in itertools.pairwise(label))))
        start += labels
    return samples


def _integers(call: OpCall, name: str) -> tuple[int, ...]:
    """The values of an argument that is a list, or a small tensor, of integers; () if unknown."""
    value = call.settings.get(name)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return call.tensors[name].numbers if name in call.tensors else ()


# Normalisation ----------------------------------------------------------------------------------


def _groups(call: OpCall) -> int | None:
    """How many variances a normalisation layer computes; None of any other function."""
    given = call.tensors.get("input")
    if given is None:
        return None
    if call.function in ("native_layer_norm", "_fused_rms_norm"):
        shape = call.settings.get("normalized_shape") or []
        return math.prod(given.shape[: len(given.shape) - len(shape)])
    if call.function == "native_group_norm":
        return int((call.number("N") or 1) * (call.number("group") or 1))
    if "batch_norm" in call.function and "backward" not in call.function and len(given.shape) > 1:
        return given.shape[1]
    return None


@rule(functions=("*batch_norm*",), of_forward=True)
def single_value_a_channel(evidence: OpEvidence) -> Cause | None:
    """In training, the running variance of one value divides by 1 - 1 = 0."""
    call = evidence.forward_call
    groups = _groups(call)
    if groups is None or call.settings.get("training") is False:
        return None
    given = call.tensors["input"]
    if math.prod(given.shape) != groups or "no_training" in call.function:
        return None
    return Cause(
        "batch norm in training of one value a channel",
        f"input of {list(given.shape)} has 1 value in each of {groups} channels; running_var is "
        "divided by 1 - 1 = 0",
        "DataLoader(..., drop_last=True), or a larger batch",
    )


@rule()
def zero_variance(evidence: OpEvidence) -> Cause | None:
    """All values of a group are the same, and eps is 0 or rounds to 0."""
    call = evidence.forward_call
    groups, eps = _groups(call), call.number("eps") or 0.0
    if groups is None:
        return None
    running = call.stats("running_var")
    if running is not None and call.settings.get("training") is not True:
        if running.min is None or running.min + eps > torch.finfo(running.dtype).tiny:
            return None
        numbers = f"running_var goes down to {running.min:g}, eps is {eps:g}"
    else:
        given = call.tensors["input"]
        # Mean and reciprocal deviation follow the output; running statistics come before it.
        output = next((i for i, r in enumerate(call.results) if r.shape == given.shape), 0)
        inverse = [r.stats for r in call.results[output + 1 :] if r.stats is not None]
        infinite = max((stats.posinf_count for stats in inverse), default=0)
        if not infinite:
            return None
        numbers = (
            f"{infinite:,} of {groups:,} groups of {math.prod(given.shape) // groups} values have "
            f"a variance for which 1 / sqrt(variance + {eps:g}) is Inf"
        )
    name = call.function.removeprefix("native_")
    remedy = f"{name}(..., eps=1e-5); and find what makes all of its input the same"
    return dataclasses.replace(causes.zero_variance(numbers, name, eps), remedy=remedy)
