"""The functions of torch that nanscan wraps, and that it gives them back."""

import contextlib
import functools

import pytest
import torch

import nanscan
from helpers.models import (
    INF,
    SCOPES,
    Net,
    batch,
    calls,
    enable,
    history,
    sgd,
    sites,
    train,
)
from helpers.optimizers import Steep, steps_of_scaler, train_scaled
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- functions of torch that are wrapped -----------------------------------------------------------


def wrapped():
    """What nanscan wraps, as it is now."""
    return (
        torch.autograd.backward,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
    )


@pytest.fixture
def originals():
    """Those functions of torch; it also sees to it that they are back in the end."""
    found = wrapped()
    assert all(function.__module__.startswith("torch.") for function in found)
    assert not any(hasattr(function, "__wrapped__") for function in found[:2])
    yield found
    torch.autograd.backward, torch.amp.GradScaler.step = found[:2]
    torch.nn.utils.clip_grad._clip_grads_with_norm_ = found[2]


@pytest.mark.parametrize("end", ["disable", "close", "pause", "watch", "error"])
@SCOPES
def test_functions_of_torch_are_as_before(scope, end, originals):
    model = Net()
    target = model if scope == "model" else None
    if end in ("watch", "error"):
        with contextlib.suppress(ZeroDivisionError), nanscan.watch(target, kinds=KINDS):
            assert wrapped() != originals
            train_scaled(model, sgd(model), [batch()])
            if end == "error":
                raise ZeroDivisionError
    else:
        monitor = nanscan.enable(target, kinds=KINDS)
        assert wrapped() != originals
        train_scaled(model, sgd(model), [batch()])
        {"disable": nanscan.disable, "close": monitor.close, "pause": monitor.pause}[end]()
    assert wrapped() == originals
    if end == "pause":
        monitor.resume()
        assert wrapped() != originals
        monitor.close()
        assert wrapped() == originals


def test_functions_of_torch_stay_wrapped_until_the_last_monitor_closes(originals):
    first, second = Net(), Net()
    monitors = [nanscan.enable(first, kinds=KINDS), nanscan.enable(second, kinds=KINDS)]
    ours = wrapped()
    monitors[0].close()
    assert wrapped() == ours
    train_scaled(second, sgd(second), [batch()])
    assert "loss" in sites(monitors[1])
    monitors[1].close()
    assert wrapped() == originals
    again = nanscan.enable(first, kinds=KINDS)
    train_scaled(first, sgd(first), [batch()])
    assert calls(again)["loss"] == 1
    nanscan.disable()
    assert wrapped() == originals


@pytest.mark.parametrize("wraps", [True, False])
def test_what_someone_else_wraps_around_ours_is_left_to_them(originals, wraps):
    seen = []
    model = Net()
    monitor = nanscan.enable(model, kinds=KINDS)
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        seen.append("theirs")
        return ours(*args, **kwargs)

    if wraps:
        functools.update_wrapper(theirs, ours)
    torch.autograd.backward = theirs
    train(model, sgd(model), [batch()])
    monitor.close()
    assert torch.autograd.backward is theirs
    assert torch.amp.GradScaler.step is originals[1]
    train(model, sgd(model), [batch()])  # ours is idle now, and lets all through
    assert seen == ["theirs"] * 2

    again = nanscan.enable(model, kinds=KINDS)
    train(model, sgd(model), [batch(), batch(1)])
    assert seen == ["theirs"] * 4
    assert history(again, "loss", "loss")["calls"].tolist() == [1, 1]
    again.close()
    assert torch.autograd.backward is theirs
    torch.autograd.backward = originals[0]
    last = nanscan.enable(model, kinds=KINDS)
    train(model, sgd(model), [batch()])
    assert calls(last)["loss"] == 1
    last.close()
    assert wrapped() == originals


def test_a_scaler_step_wrapped_twice_is_one_step(originals):
    model = Steep(INF)
    nanscan.enable(model)
    ours = torch.amp.GradScaler.step
    torch.amp.GradScaler.step = lambda *args: ours(*args)  # noqa: PLW0108 - not ours
    nanscan.disable()
    monitor = nanscan.enable(model, kinds="grad", action="log", max_skipped_steps=3)
    steps_of_scaler(torch.amp.GradScaler("cpu"), model, sgd(model), 3)
    assert monitor.steps == 3
    assert [(f.step, f.verdict) for f in monitor.findings] == [
        (0, "scale-search"),
        (2, "persistent-overflow"),
    ]


def test_wrapped_functions_look_like_those_of_torch(originals):
    import inspect

    nanscan.enable(Net())
    for ours, theirs in zip(wrapped(), originals, strict=True):
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__
        assert ours.__name__ == theirs.__name__


@SCOPES
def test_arguments_of_backward_and_of_a_scalers_step_go_through(scope):
    class Returns(torch.optim.SGD):
        def step(self, closure=None, *, extra=None):
            super().step()
            return extra

    model = Net()
    enable(scope, model, kinds=KINDS)
    optimizer = Returns(model.parameters(), 0.1)
    out = model(batch())
    gradients = [torch.ones_like(out)]
    torch.autograd.backward(tensors=[out], grad_tensors=gradients, retain_graph=True)
    torch.autograd.backward(out, gradients[0], inputs=[model.fc1.weight])
    assert torch.equal(model.fc1.weight.grad, 2 * model.fc1.weight.grad / 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(batch()).sum()).backward()
    assert scaler.step(optimizer, extra="result") == "result"
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert off.step(optimizer, extra="more") == "more"
