"""enable, disable, watch, probe: what users call to watch a run."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nanscan._data.site import DEFAULT_KINDS, Kind
from nanscan._monitor import Monitor, open_monitors
from nanscan._options import Filter, Ignore, Options
from nanscan._output.sinks import Action


def enable(  # noqa: PLR0913 - options by name
    model: nn.Module | None = None,
    *,
    kinds: Iterable[Kind | str] = DEFAULT_KINDS,
    action: Action | Iterable[Action] = "warn",
    history: int = 16,
    near_limit: float = 0.5,
    max_skipped_steps: int = 20,
    ignore: Ignore = (),
    include: Filter | None = None,
    exclude: Filter = (),
    every_n_steps: int = 1,
    warmup_steps: int = 0,
    max_overhead: float | None = None,
    skip_step: bool = False,
    save_dir: str | os.PathLike[str] | None = None,
    locate: bool = False,
) -> Monitor:
    """Turns the hooks on, for one model or for every module of the process.

    Args:
        model: the model to watch; None: every module that is called from now on. Enabling the same
            target again replaces its monitor.
        kinds: what to scan: module "input" (only tensors that no watched module returned) and
            "output", the "loss" that a backward starts from, each `probe`, parameter "grad" before
            an optimizer step, "param" and "buffer" (where it changed) after it; and, not by
            default, "grad_output", the gradient that reaches each output, and "state", the
            optimizer's moments. On the CPU a parameter that other code made bad between two steps
            is named as well; on other devices what the next forward makes of it is the origin.
            Where no optimizer holds the parameters, gradients are scanned after each backward, and
            parameters before the next forward: but not what `torch.autograd.grad` returns, which
            nobody sees but the caller.
        action: what to do on the first bad step of an episode: "warn", "raise" a NonFiniteError
            from the call that ends the step, "log" to the logger "nanscan", a callable that gets
            the Finding (and each Located), a `Sink`, or several of these. Values near the limit
            never raise: they are logged, or given to the callable.
        history: steps kept of each site.
        near_limit: share of a dtype's largest value from which a finite value is reported.
        max_skipped_steps: optimizer steps in a row that a GradScaler may skip: that many are a
            fault. From its first scale of 65536 down to 1 it takes 16.
        ignore: what never to report: patterns of qualified names ("*.attn.softmax", "encoder.*"),
            dtypes, kinds as "kind:grad", or a function of (Site, dtype) that returns True.
        include: watch only modules of these types or names, and what lies inside the named ones:
            patterns of qualified names ("decoder.layers.*"). None: all.
        exclude: the same of modules, and of parameters and buffers by name, not to watch.
        every_n_steps: scan one step in so many.
        warmup_steps: scan nothing in so many first steps.
        max_overhead: share of a step's time, such as 0.02, that hooks may take on the host, and
            scans on the device.
            Parameters, buffers and moments are then scanned in some steps only, and if that is not
            enough, module outputs and their gradients by turns; the loss, gradients of parameters,
            and outputs of the outermost modules and of those right inside them in every step. After
            a fault the next steps are scanned in full. `coverage` tells what is thinned out.
        skip_step: an optimizer does not take a step in which a gradient that it is about to use is
            non-finite: parameters and state stay bit for bit as if `step()` had not been called,
            and gradients as they are. All else goes on: the closure's loss is returned, a scheduler
            steps, the finding is acted on. Gradients are then scanned in every step. For any
            optimizer that finds its parameters in `param_groups`; where a closure makes the
            gradients, it is called once, or this is LBFGS, which needs memory for a copy of the
            parameters then; not for a step that torch.compile compiled. Each process decides by its
            own gradients: not for sharded ones, where others would take the step. What `ignore`
            matches is no reason to skip.
        save_dir: a folder. The first bad step of an episode, and of a run the first three of these,
            is written to "step-<n>-rank-<r>" in it, for `load_saved`: inputs of the outermost
            module's last call, states of random number generators before that, parameters and
            buffers up to 1 GiB. Until a step is judged, the inputs of its calls are kept alive; no
            tensor is copied until it is bad, but the states are, in 0.1 ms a call. What was changed
            in place since the call, and what torch.load does not take with weights_only=True, is
            left out with a note. If the folder cannot be written, that is logged, once, and nothing
            else happens.
        locate: after a fault the next steps run op by op, as `nanscan.locate` does it, until the op
            is known that makes the bad values, at most 16; then the monitor is as cheap as before.
            After 64 such steps, only one step in 50 is spent so. The finding gets a `Located`, in
            `Monitor.located` and for the action, though never by raising. Where the fault left
            nothing to be seen (its optimizer's step spoiled the parameters), that says so, and how
            to replay it. Not in steps that begin within a TorchDispatchMode of the user's.

    Returns:
        The monitor; `close` it or call `disable`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown kind or action, or a number out of range.

    Synchronization: none, in hooks either, with these exceptions. Under `skip_step`, gradients on
        the CPU need none, and on CUDA devices a fused Adam, AdamW, Adagrad or SGD none from the
        second step on: it gets `found_inf`, computed on the device. All others wait once a step
        for their gradients. Writing a step under `save_dir` waits for what it writes, and a step
        that is searched under `locate` for its scans, when it ends.
    """
    options = Options(
        kinds=kinds,
        action=action,
        history=history,
        near_limit=near_limit,
        max_skipped_steps=max_skipped_steps,
        ignore=ignore,
        include=include,
        exclude=exclude,
        every_n_steps=every_n_steps,
        warmup_steps=warmup_steps,
        max_overhead=max_overhead,
        skip_step=skip_step,
        save_dir=save_dir,
        locate=locate,
    )
    return _open(model, options)


def _open(model: nn.Module | None, options: Options) -> Monitor:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"nanscan: expected a torch.nn.Module or None, got {type(model).__name__}")
    for monitor in tuple(open_monitors):
        if monitor._watches(model):  # noqa: SLF001 - one unit with the monitor
            monitor.close()
    return Monitor(model, options)


@contextlib.contextmanager
def watch(  # noqa: PLR0913 - options by name
    model: nn.Module | None = None,
    *,
    kinds: Iterable[Kind | str] = DEFAULT_KINDS,
    action: Action | Iterable[Action] = "warn",
    history: int = 16,
    near_limit: float = 0.5,
    max_skipped_steps: int = 20,
    ignore: Ignore = (),
    include: Filter | None = None,
    exclude: Filter = (),
    every_n_steps: int = 1,
    warmup_steps: int = 0,
    max_overhead: float | None = None,
    skip_step: bool = False,
    save_dir: str | os.PathLike[str] | None = None,
    locate: bool = False,
) -> Iterator[Monitor]:
    """Watches a model inside a `with` block; takes the options of `enable`.

    On the way out what is left is judged; when the block raised, its error goes on and findings are
    warned of instead of raised.

    Yields:
        The monitor.

    Raises:
        TypeError: as for `enable`.
        ValueError: as for `enable`.
        NonFiniteError: under the action "raise".

    Synchronization: as for `enable`; the end of the block waits for the scans.
    """
    options = Options(
        kinds=kinds,
        action=action,
        history=history,
        near_limit=near_limit,
        max_skipped_steps=max_skipped_steps,
        ignore=ignore,
        include=include,
        exclude=exclude,
        every_n_steps=every_n_steps,
        warmup_steps=warmup_steps,
        max_overhead=max_overhead,
        skip_step=skip_step,
        save_dir=save_dir,
        locate=locate,
    )
    monitor = _open(model, options)
    try:
        yield monitor
    except BaseException:
        monitor._judge_rest()  # noqa: SLF001
        raise
    else:
        monitor.flush()
    finally:
        monitor.close()


def disable() -> None:
    """Closes every monitor of the process. No hook of nanscan is left anywhere."""
    for monitor in tuple(open_monitors):
        monitor.close()


def probe(name: str, x: Any) -> Any:
    """A named place inside a forward: scans `x`, a tensor or a container of some, and returns it.

    Args:
        name: what findings call it; the same name is the same place.
        x: what to scan.

    Returns:
        `x` itself. While no monitor is open this does nothing.

    Synchronization: none.
    """
    if not torch.compiler.is_dynamo_compiling():
        for monitor in tuple(open_monitors):
            monitor.probe(name, x)
    return x


def _after_fork() -> None:
    for monitor in open_monitors:
        monitor._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    for monitor in tuple(open_monitors):
        monitor._judge_rest()  # noqa: SLF001
        monitor.close()
