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
    """Turns nanscan on, for one model or for every module of the process.

    Args:
        model: the model to watch. None: every module that is called from now on. A second call for
            the same model closes the earlier monitor.
        kinds: what to scan. By default: "input" (module inputs that no watched module returned),
            "output" (module outputs), "loss" (the tensor that a backward starts from), "probe"
            (values given to `probe`), "grad" (parameter gradients, before an optimizer step),
            "param" and "buffer" (after the step; buffers only where they changed). On request:
            "grad_output" (the gradient that reaches each module output) and "state" (the
            optimizer's moments).
            Other code may make a parameter bad between two steps. On the CPU the finding then names
            the parameter. On other devices it names the first bad output of the next forward.
            If no optimizer holds the parameters, gradients are scanned after each backward, and
            parameters before the next forward. Gradients that `torch.autograd.grad` returns are not
            scanned.
        action: what to do at the first bad step of an episode: "warn", "raise" (a NonFiniteError,
            from the call that ends the step), "log" (to the logger "nanscan"), a callable that gets
            each Finding and each Located, a `Sink`, or several of these. Values near the limit
            never raise: they are logged, or given to the callable.
        history: number of past steps kept for each site.
        near_limit: a finite value is reported from this share of its dtype's largest value on.
        max_skipped_steps: a GradScaler may skip fewer than this many optimizer steps in a row. This
            many are a fault. To go from its initial scale, 65536, down to 1 it needs 16.
        ignore: what never to report: patterns of qualified names ("*.attn.softmax", "encoder.*"),
            dtypes, kinds as "kind:grad", or a function of (Site, dtype) that returns True.
        include: watch only these modules: module types, or patterns of qualified names
            ("decoder.layers.*"), which also name the modules inside. None: all modules.
        exclude: do not watch these modules, parameters and buffers. Give module types or patterns
            of qualified names.
        every_n_steps: scan one step of every n.
        warmup_steps: number of first steps in which nothing is scanned.
        max_overhead: largest share of a step's time, such as 0.02, that nanscan may take on the
            host, and its scans on the device. To stay below it, parameters, buffers and moments are
            scanned only in some steps. If that is not enough, module outputs and their gradients
            take turns too. Always scanned are the loss, parameter gradients, and outputs of the
            outermost modules and of their direct children. After a fault the next steps are scanned
            in full. `Monitor.coverage` lists what is scanned less often.
        skip_step: skip an optimizer step if a gradient that it would use is non-finite. Parameters
            and optimizer state then keep exactly the same bits, and gradients stay as they are.
            Everything else continues: the closure's loss is returned, a scheduler steps, and the
            finding is reported. Gradients are then scanned in every step. What `ignore` matches
            does not cause a skip.
            It works with any optimizer that has its parameters in `param_groups`. If a closure
            computes the gradients, the optimizer must call it once, or be LBFGS, which then needs
            memory for a copy of the parameters. It does not work for a step that torch.compile
            compiled. Do not use it with sharded gradients: each process decides from its own
            gradients, so others could take the step.
        save_dir: a folder for saved steps. The first bad step of each of the first three episodes
            of a run is written to "step-<n>-rank-<r>" in it; read it with `load_saved`. Saved are
            the inputs of the outermost module's last call, the states of the random number
            generators before that call, and parameters and buffers up to 1 GiB.
            The inputs of a step stay in memory until the step is judged. Tensors are copied only if
            the step is bad. Random states are copied at each call, in about 0.1 ms. A tensor that
            was changed in place since the call is left out with a note, and so is a value that
            torch.load refuses with weights_only=True. If the folder cannot be written, the error is
            logged once and training continues.
        locate: after a fault, run the next steps op by op, as `nanscan.locate` does, until the op
            that makes the bad values is found. A search takes at most 16 steps; then the monitor is
            as cheap as before. After 64 such steps in all, only one step in 50 is searched. The
            result is a `Located`, in `Monitor.located` and for the action; it never raises. If the
            optimizer step of the fault spoiled the parameters, the op cannot be found any more; the
            Located says so, and how to replay the step. Steps that begin inside a
            TorchDispatchMode of the user's are not searched.

    Returns:
        The monitor. To end it, call its `close` or `disable`.

    Raises:
        TypeError: `model` is not a module, or an option has a wrong type.
        ValueError: an unknown kind or action, or a number out of range.

    Synchronization: watching never waits for a device, with three exceptions.
        `skip_step`: waits once a step for CUDA gradients. A fused Adam, AdamW, Adagrad or SGD waits
        only in its first step; later it gets `found_inf`, which the device computes. Gradients on
        the CPU need no wait.
        `save_dir`: writing a step waits for the data that it writes.
        `locate`: a searched step waits for its scans when it ends.
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

    At the end of the block the steps not judged yet are judged. If the block raised an error, that
    error continues, and findings become warnings instead of errors.

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
    """Closes every monitor of the process; torch is as it was before."""
    for monitor in tuple(open_monitors):
        monitor.close()


def probe(name: str, x: Any) -> Any:
    """Scans a tensor, or a container of tensors, under a name, and returns it unchanged.

    Args:
        name: the name in findings. Calls with the same name share one site.
        x: the tensor or container to scan.

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
