"""Which call of a step went bad, where a site has several: accumulation, shared modules."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers import fake_cuda
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Gap,
    Net,
    batch,
    enable,
    infer,
    set_nan,
    sgd,
    train,
)
from nanscan import BadCall

HOST = pytest.mark.host_only(reason="devices tell calls apart later, and do not count them")
ROWS = (3, 2, 5, 4)  # of the micro-batches


def accumulate(model, optimizer, xs, loss=lambda out: out.square().mean()):
    """One step, and a backward for each micro-batch."""
    optimizer.zero_grad()
    for x in xs:
        loss(model(x)).backward()
    optimizer.step()


def micro_batches(bad=None):
    xs = [batch(i, rows) for i, rows in enumerate(ROWS)]
    if bad is not None:
        xs[bad] = set_nan(xs[bad])
    return xs


def found(monitor, site):
    return next(f for f in monitor.findings if str(f.site) == site)


@HOST
@SCOPES
@pytest.mark.parametrize("kinds", [None, (*nanscan._data.site.DEFAULT_KINDS, "grad_output")])
def test_an_input_in_the_third_of_four_micro_batches(scope, kinds):
    model = Net()
    options = {} if kinds is None else {"kinds": kinds}
    monitor = enable(scope, model, action="log", **options)
    optimizer = sgd(model)
    accumulate(model, optimizer, micro_batches())
    accumulate(model, optimizer, micro_batches(bad=2))
    first = monitor.findings[0]
    assert (first.step, str(first.site)) == (1, "Net input[0]")
    # It is told as soon as the call has returned.
    assert first.bad_call == BadCall(3, 3, False, (5, 4), 20, 1, 0, 0)
    assert "\n  call      3 of 3 so far: 1 NaN of 20, shape [5, 4]\n" in str(first)
    assert first.stats.numel == 4 * (3 + 2 + 5)
    output = found(monitor, "fc1 output")
    assert output.bad_call == BadCall(3, 3, False, (5, 4), 20, 4, 0, 0)
    for site in ("fc1.weight grad", "fc1.weight param"):
        assert found(monitor, site).bad_call is None
        assert "\n  call" not in str(found(monitor, site))


@HOST
@SCOPES
def test_the_whole_step_is_known_where_it_is_judged_at_its_end(scope):
    """The first bad call is looked at no sooner than that, where each has its own module."""
    model = Net()
    model.act = Do(lambda x: x / 0 if x.shape[0] == 4 else x * 1)
    monitor = enable(scope, model, action="log")
    accumulate(model, sgd(model), micro_batches()[3:] + micro_batches()[:3])
    output = found(monitor, "act output")
    assert output.bad_call.number == 1
    assert output.bad_call.shape == (4, 4)
    assert output.bad_call.numel == 16
    assert output.bad_call.posinf_count + output.bad_call.neginf_count == 16


@HOST
@SCOPES
def test_a_later_bad_call_changes_nothing(scope):
    model = nn.Sequential(Do(lambda x: x), nn.Linear(4, 4))
    monitor = enable(scope, model, action="log", skip_step=True)
    xs = micro_batches()
    xs[1] = xs[1].fill_(INF)
    accumulate(model, sgd(model), [xs[0], xs[1], set_nan(xs[2]), xs[3]])
    first = monitor.findings[0]
    assert first.bad_call == BadCall(2, 2, False, (2, 4), 8, 0, 8, 0)


@HOST
@SCOPES
def test_the_loss_and_the_gradient_of_an_output(scope):
    """Each backward is a call."""
    model = Net()
    kinds = ("loss", "grad_output", "grad", "output", "input")
    monitor = enable(scope, model, action="log", kinds=kinds, skip_step=True)
    optimizer = sgd(model)
    numbers = iter(range(8))

    def loss(out):
        value = out.square().mean()
        return value * NAN if next(numbers) == 2 else value

    accumulate(model, optimizer, micro_batches(), loss)
    first = found(monitor, "loss")
    assert (first.bad_call.number, first.bad_call.shape) == (3, ())
    assert "\n  backward  3 of " in str(first)
    gradient = found(monitor, "fc2 grad_output")
    assert (gradient.bad_call.number, gradient.bad_call.shape) == (3, (5, 4))
    assert gradient.bad_call.nan_count == 20
    assert found(monitor, "fc2.bias grad").bad_call is None


@HOST
@SCOPES
def test_a_module_that_one_forward_calls_four_times(scope):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.bad_in = None

        def forward(self, x):
            for number in range(4):
                x = self.layer(x)
                if number == self.bad_in:
                    x = x * NAN
            return x

    model = Loop()
    monitor = enable(scope, model, action="log", skip_step=True)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    model.bad_in = 1
    train(model, optimizer, [batch()])
    output = found(monitor, "layer output")
    assert output.bad_call == BadCall(3, 4, True, (3, 4), 12, 12, 0, 0)
    assert "\n  call      3 of 4: 12 NaN of 12, shape [3, 4]\n" in str(output)
    # Of its inputs one was scanned: the others are what other modules returned, or itself.
    given = found(monitor, "layer input[0]")
    assert (given.stats.calls, given.bad_call) == (1, None)


@HOST
@SCOPES
def test_the_same_batch_again(scope):
    """A tensor that was scanned is not scanned again: its row has fewer scans than calls."""
    model = Net()
    monitor = enable(scope, model, action="log", skip_step=True)
    good, bad = batch(), set_nan(batch(1))
    accumulate(model, sgd(model), [good, good, good, bad])
    given = found(monitor, "Net input[0]")
    assert (given.stats.calls, given.bad_call) == (2, None)
    assert found(monitor, "fc1 output").bad_call.number == 4


@HOST
@SCOPES
def test_a_checkpoint_counts_no_call_twice(scope):
    class Checkpointed(Net):
        def forward(self, x):
            return self.fc2(checkpoint(lambda x: self.act(self.fc1(x)), x, use_reentrant=False))

    model = Checkpointed()
    monitor = enable(scope, model, action="log", skip_step=True)
    accumulate(model, sgd(model), micro_batches(bad=2))
    output = found(monitor, "fc1 output")
    assert (output.bad_call.number, output.bad_call.calls) == (3, 3)
    assert monitor.history("fc1 output")["calls"].tolist() == [4]
    again = [f for f in monitor.findings if "(recomputed)" in str(f.site)]
    assert again
    assert all(f.bad_call is None for f in again)


@HOST
@SCOPES
def test_one_call_has_no_line(scope):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert monitor.findings
    for finding in monitor.findings:
        assert finding.bad_call is None
        assert "  call  " not in str(finding)


@HOST
def test_each_step_has_its_own_call():
    """Counts of an earlier bad step, and shapes, are not taken for those of this one."""
    model = Net()
    monitor = nanscan.enable(model, action="log", skip_step=True)
    optimizer = sgd(model)
    accumulate(model, optimizer, micro_batches(bad=2))
    accumulate(model, optimizer, micro_batches())
    accumulate(model, optimizer, micro_batches(bad=1))
    calls = [
        (f.step, f.bad_call.number, f.bad_call.shape, f.bad_call.numel)
        for f in monitor.findings
        if str(f.site) == "Net input[0]" and f.is_fault
    ]
    assert calls == [(0, 3, (5, 4), 20), (2, 2, (2, 4), 8)]


@HOST
@SCOPES
def test_which_input_it_was_is_not_guessed(scope):
    """Two of four inputs of the layer are another module's outputs: its own row has the others."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return sum(self.layer(part) for part in (self.first(x), x * 2, self.first(x), x / 0))

    model = Mixing()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    given = found(monitor, "layer input[0]")
    assert (given.stats.calls, given.bad_call) == (2, None)
    assert found(monitor, "layer output").bad_call.number == 4


@HOST
def test_a_complex_tensor_counts_its_parts():
    model = Do(lambda x: x + 0)
    monitor = nanscan.enable(model, action="log")
    monitor.step()  # the user ends steps
    infer(model, torch.ones(2, dtype=torch.complex64), torch.full((3,), complex(NAN, 1.0)))
    monitor.step()
    call = found(monitor, "Do output").bad_call
    assert call == BadCall(2, 2, True, (3,), 6, 3, 0, 0)


def test_what_a_device_tells_of_a_call():
    """Which it was, and of what shape: its rows have only the sums of counts."""
    model = Net()
    monitor = nanscan.enable(model, action="log")
    accumulate(model, sgd(model), micro_batches(bad=2))
    monitor.flush()
    call = found(monitor, "Net input[0]").bad_call
    assert (call.number, call.shape) == (3, (5, 4))
    if fake_cuda.wanted():
        assert call == BadCall(3, 3, False, (5, 4))
        assert str(call) == "3 of 3 so far, shape [5, 4]"
    else:
        assert call == BadCall(3, 3, False, (5, 4), 20, 1, 0, 0)
