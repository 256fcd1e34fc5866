"""Steps, actions, the life of a monitor, and what is asked of it."""

import dataclasses
import gc
import logging
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

import nanscan
from helpers.models import (
    NAN,
    SCOPES,
    Beside,
    Do,
    Gap,
    Net,
    batch,
    calls,
    enable,
    hook_dicts,
    infer,
    run_quiet,
    set_nan,
    sgd,
    train,
    verdicts,
)
from nanscan import NonFiniteError, NonFiniteWarning, Site

pytestmark = pytest.mark.usefixtures("seeded_and_without_trace")


class Switch(nn.Module):
    """Passes values on, or makes NaN out of them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bad = False

    def forward(self, x):
        return self.fc(x) * (NAN if self.bad else 1)


# -- where a step ends -----------------------------------------------------------------------------


@SCOPES
def test_an_optimizer_step_ends_a_step(scope):
    model = Net()
    monitor = enable(scope, model)
    train(model, sgd(model), [batch(i) for i in range(3)])
    assert monitor.history(Site("fc1", "output"))["step"].tolist() == [0, 1, 2]
    assert monitor.history(Site("fc1.weight", "param"))["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@SCOPES
def test_without_an_optimizer_the_outermost_forward_ends_a_step(scope, mode):
    gc.collect()  # an optimizer of an earlier test would make forwards wait for it
    model = Net()
    monitor = enable(scope, model)
    with mode():
        for seed in range(3):
            model(batch(seed))
    history = monitor.history(Site("fc1", "output"))
    assert (history["step"].tolist(), history["calls"].tolist()) == ([0, 1, 2], [1, 1, 1])


@SCOPES
def test_a_forward_while_an_optimizer_waits_is_no_step(scope):
    model = Net()
    optimizer = sgd(model)
    monitor = enable(scope, model)
    model(batch())
    assert monitor.steps == 0
    model(batch()).sum().backward()
    optimizer.step()
    assert monitor.history(Site("fc1", "output"))["calls"].tolist() == [2]


@SCOPES
def test_validation_counts_to_the_step_it_runs_in_and_is_judged_at_once(scope):
    model = Net()
    optimizer = sgd(model)
    monitor = enable(scope, model)
    train(model, optimizer, [batch(0), batch(1)])
    model.eval()
    infer(model, batch(2), batch(3))
    assert monitor.findings == []
    with pytest.warns(NonFiniteWarning, match="in step 2"):
        infer(model, set_nan(batch(4)))
    assert verdicts(monitor)[0] == (2, "Net input[0]", "propagated")
    model.train()
    train(model, optimizer, [batch(5)])
    history = monitor.history(Site("fc1.weight", "grad"))
    assert history["step"].tolist() == [0, 1, 2]
    assert monitor.healthy


@SCOPES
def test_a_teacher_in_each_step_does_not_split_it(scope):
    """A forward without gradients amid a training step leaves that step in one piece."""
    student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Gap(lambda x: (x * 0).sqrt()))
    teacher = Net()
    both = Beside(student, teacher)
    optimizer = sgd(student)
    monitor = enable(scope, both)

    def loss(out):
        with torch.no_grad():
            teacher(batch())
        return out.square().mean()

    run_quiet(train, both, optimizer, [batch()], loss)
    assert verdicts(monitor)[:2] == [
        (0, "main.2.fc1.weight grad", "origin"),
        (0, "main.2.fc1.bias grad", "propagated"),
    ]
    assert monitor.history(Site("main.0", "output"))["step"].tolist() == [0]


@SCOPES
def test_flush_amid_a_step_leaves_it_in_one_piece(scope):
    model = Gap(lambda x: x / 0)
    optimizer = sgd(model)
    monitor = enable(scope, model, action="log")
    loss = model(batch()).sum()
    assert [str(f.site) for f in monitor.flush()] == ["fc2 input[0]", "fc2 output"]
    assert monitor.flush() == []
    loss.backward()
    optimizer.step()
    assert {f.verdict for f in monitor.findings[1:]} == {"propagated"}
    assert {f.step for f in monitor.findings} == {0}
    assert monitor.history(Site("fc1", "output"))["calls"].tolist() == [1]


@SCOPES
def test_manual_steps(scope):
    model = Net()
    optimizer = sgd(model)
    monitor = enable(scope, model)
    monitor.step()
    train(model, optimizer, [batch(), batch()])
    infer(model, batch())
    assert "fc1 output" not in calls(monitor)
    monitor.step()
    train(model, optimizer, [batch()])
    monitor.step()
    assert monitor.history(Site("fc1", "output"))["calls"].tolist() == [3, 1]


def test_manual_steps_are_counted_also_when_nothing_was_scanned():
    model = Net()
    monitor = nanscan.enable(model)
    for _ in range(3):
        monitor.step()
    infer(model, batch())
    monitor.step()
    assert monitor.history(Site("fc1", "output"))["step"].tolist() == [3]


@SCOPES
def test_step_numbers_of_findings(scope):
    model = Switch()
    optimizer = sgd(model)
    monitor = enable(scope, model, action="log")
    for step in range(6):
        model.bad = step == 4
        train(model, optimizer, [batch(step)])
    assert {(f.step, f.rank) for f in monitor.findings if f.site.kind != "input"} == {
        (4, 0),
        (5, 0),
    }
    assert verdicts(monitor)[0] == (4, "Switch output", "origin")


@SCOPES
def test_mixed_precision_with_a_scaler_is_clean(scope):
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    monitor = enable(scope, model)
    for seed in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(seed)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.steps == 3
    assert monitor.findings == []


# -- exceptions ------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises at a chosen depth of modules, when told to."""

    def __init__(self, depth):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = Fails(depth - 1) if depth else None
        self.error = None

    def forward(self, x):
        x = nn.Tanh()(self.fc(x))
        if self.error is not None:
            raise self.error
        return self.inner(x) if self.inner is not None else x


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("depth", [0, 1, 2])
@SCOPES
def test_exceptions_at_any_depth_leave_steps_and_names_right(scope, depth, error):
    model = Fails(2)
    failing = model
    for _ in range(depth):
        failing = failing.inner
    monitor = enable(scope, model)
    infer(model, batch())
    sites = set(monitor.coverage().sites)
    for _ in range(2):
        failing.error = error("by the test")
        with pytest.raises(error, match="by the test"):
            infer(model, batch())
        failing.error = None
        infer(model, batch(), batch())
    assert monitor.steps == 5
    assert set(monitor.coverage().sites) == sites
    assert calls(monitor)["inner.inner.fc output"] == 1
    monitor.close()
    model.inner.fc.weight.data.fill_(NAN)
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    assert verdicts(monitor)[0] == (0, "inner.fc.weight param", "origin")


@SCOPES
def test_an_error_that_the_model_itself_catches(scope):
    class Fallback(nn.Module):
        def __init__(self):
            super().__init__()
            self.risky = Fails(1)
            self.safe = nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.risky(x)
            except ValueError:
                return self.safe(x) * NAN

    model = Fallback()
    monitor = enable(scope, model, action="log")
    infer(model, batch())
    model.risky.inner.error = ValueError()
    infer(model, batch())
    assert verdicts(monitor) == [(1, "Fallback output", "origin")]
    assert monitor.steps == 2


def test_another_model_after_an_interrupt_is_a_model_of_its_own():
    first, second = Fails(1), Net()
    monitor = nanscan.enable()
    first.inner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        infer(first, batch())
    infer(second, batch())
    assert monitor.steps == 1
    assert "Net.fc1 output" in calls(monitor)


def test_a_module_that_calls_itself():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, depth=3):
            return self.fc(x if depth == 0 else self(x, depth - 1))

    for model in (Tree(), nn.Sequential(Tree())):
        monitor = nanscan.enable(model)
        infer(model, batch(), batch())
        assert monitor.steps == 2
        assert [n for site, n in calls(monitor).items() if site.endswith("fc output")] == [4]


@SCOPES
def test_none_as_output_while_an_error_is_handled(scope):
    model = nn.Sequential(Do(lambda x: None))
    monitor = enable(scope, model)
    try:
        int("x")
    except ValueError:
        infer(model, batch(), batch())
    assert monitor.steps == 2


# -- actions ---------------------------------------------------------------------------------------


@SCOPES
def test_warn_once_an_episode_at_the_line_of_the_user(scope):
    model = Switch()
    optimizer = sgd(model, 0.0)
    enable(scope, model)
    warned = []
    for step, model.bad in enumerate([False, True, True, False, False, True]):
        model(batch())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += [(step, w.category, w.filename, w.lineno, str(w.message)) for w in caught]
    with Path(__file__).open() as file:
        lines = [line.strip() for line in file]
    assert [(step, kind, name, lines[n - 1]) for step, kind, name, n, _ in warned] == [
        (1, NonFiniteWarning, __file__, "optimizer.step()"),
        (5, NonFiniteWarning, __file__, "optimizer.step()"),
    ]
    for step, *_, text in warned:
        start = f"nanscan: Switch output is non-finite in step {step} (origin"
        assert text.startswith(start)


@SCOPES
def test_warn_from_a_forward_points_at_the_line_of_the_call(scope):
    model = nn.Sequential(Switch())
    model[0].bad = True
    enable(scope, model)
    with pytest.warns(NonFiniteWarning) as caught, torch.no_grad():
        model(batch())
    assert caught[0].filename == __file__
    line = caught[0].lineno
    with Path(__file__).open() as file:
        assert file.readlines()[line - 1].strip() == "model(batch())"


@SCOPES
def test_raise_from_an_optimizer_step(scope):
    model = Switch()
    optimizer = sgd(model)
    monitor = enable(scope, model, action="raise")
    train(model, optimizer, [batch()])
    model.bad = True
    model(batch()).sum().backward()
    with pytest.raises(NonFiniteError, match="Switch output is non-finite in step 1") as raised:
        optimizer.step()
    assert raised.value.finding is monitor.findings[0]
    assert raised.value.finding.site == Site("Switch", "output")
    assert isinstance(raised.value, FloatingPointError)
    model.bad = False
    train(model, optimizer, [batch()])  # in the same episode: the parameters are bad
    assert monitor.steps == 3


@SCOPES
def test_raise_from_the_outermost_forward(scope):
    model = nn.Sequential(Switch())
    monitor = enable(scope, model, action="raise")
    model[0].bad = True
    with pytest.raises(NonFiniteError) as raised:
        infer(model, batch())
    assert raised.value.finding.site == Site("0", "output")
    model[0].bad = False
    infer(model, batch())
    assert monitor.healthy
    model[0].bad = True
    with pytest.raises(NonFiniteError, match="in step 2"):
        infer(model, batch())


def test_log(caplog):
    model = Switch()
    nanscan.enable(model, action="log")
    model.bad = True
    with caplog.at_level(logging.ERROR, "nanscan"):
        infer(model, batch(), batch())
    assert [(r.name, r.levelname) for r in caplog.records] == [("nanscan", "ERROR")]
    assert caplog.records[0].message.startswith("nanscan: Switch output is non-finite in step 0")


def test_near_the_limit_is_logged_whatever_the_action(caplog):
    model = Do(lambda x: x * 1)
    nanscan.enable(model, action="raise")
    infer(model, torch.tensor([40000.0], dtype=torch.float16))
    assert [r.levelname for r in caplog.records] == ["WARNING"] * len(caplog.records)
    assert "Do input[0] is near the limit in step 0" in caplog.records[0].message


def test_a_callable_gets_the_finding():
    got = []
    model = Switch()
    monitor = nanscan.enable(model, action=got.append)
    infer(model, batch())
    model.bad = True
    infer(model, batch(), batch())
    assert got == monitor.findings == [got[0]]
    assert isinstance(got[0], nanscan.Finding)
    model.bad = False
    infer(model, batch())
    model.bad = True
    infer(model, batch())
    assert [(f.step, f.verdict) for f in got] == [(1, "origin"), (3, "recovered"), (4, "origin")]


@SCOPES
def test_errors_of_a_callable_come_through_once_an_episode(scope):
    def action(finding):
        raise LookupError(str(finding.site))

    model = Switch()
    monitor = enable(scope, model, action=action)
    model.bad = True
    with pytest.raises(LookupError, match="Switch output"):
        infer(model, batch())
    infer(model, batch())
    assert monitor.steps == 2
    assert verdicts(monitor) == [(0, "Switch output", "origin")]


@pytest.mark.parametrize("how", ["close", "disable"])
@pytest.mark.parametrize("where", ["optimizer", "forward"])
@SCOPES
def test_closing_from_within_an_action_leaves_no_trace(scope, where, how):
    model, other = Switch(), Net()
    before = hook_dicts(model, other)
    monitor = enable(
        scope, model, action=lambda _: monitor.close() if how == "close" else nanscan.disable()
    )
    second = nanscan.enable(other)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.01)
    model.bad = True
    for _ in range(3):
        if where == "forward":
            infer(model, batch())
        else:
            (model(batch()) + other(batch())).sum().backward()
            run_quiet(optimizer.step)
    second.close()
    assert hook_dicts(model, other) == before
    assert {f.step for f in monitor.findings} == {0}


def test_closing_from_within_an_action_beside_hooks_of_the_user():
    model = Switch()
    model.bad = True
    nanscan.enable(model, action=lambda _: nanscan.disable())
    ran = []
    handle = optimizer_hooks.register_optimizer_step_post_hook(lambda *_: ran.append(1))
    try:
        optimizer = sgd(model)
        train(model, optimizer, [batch(), batch()])
    finally:
        handle.remove()
    assert ran == [1, 1]


def test_pausing_and_resuming_from_within_an_action():
    def action(_):
        monitor.pause()
        monitor.resume()

    model = Switch()
    model.bad = True
    monitor = nanscan.enable(model, action=action)
    train(model, sgd(model), [batch(), batch(), batch()])
    assert monitor.steps == 3
    assert len(optimizer_hooks._global_optimizer_post_hooks) == 1


# -- the life of a monitor -------------------------------------------------------------------------


def test_pause_and_resume():
    model = Switch()
    monitor = nanscan.enable(model, action="log")
    infer(model, batch())
    monitor.pause()
    model.bad = True
    infer(model, batch())
    model.bad = False
    monitor.resume()
    monitor.resume()
    infer(model, batch())
    assert monitor.findings == []
    assert monitor.history(Site("fc", "output"))["step"].tolist() == [0, 1]
    assert calls(monitor)["fc output"] == 1


def test_resume_does_not_reopen_a_closed_monitor():
    model = Net()
    before = hook_dicts(model)
    monitor = nanscan.enable(model)
    monitor.close()
    monitor.resume()
    assert hook_dicts(model) == before


@SCOPES
def test_enable_again_replaces(scope):
    model = Net()
    first = enable(scope, model)
    second = enable(scope, model)
    infer(model, batch())
    assert first.steps == 0
    assert second.steps == 1
    assert calls(second)["fc1 output"] == 1


def test_two_monitors_on_two_models():
    good, bad = Switch(), Switch()
    first = nanscan.enable(good)
    second = nanscan.enable(bad, action="log")
    bad.bad = True
    train(good, sgd(good), [batch(), batch()])
    train(bad, sgd(bad), [batch()])
    assert (first.steps, second.steps) == (2, 1)
    assert first.findings == []
    assert verdicts(second)[0] == (0, "Switch output", "origin")


def test_a_global_monitor_beside_one_of_a_model():
    model = Switch()
    mine = nanscan.enable(model, action="log")
    everything = nanscan.enable(action="log")
    model.bad = True
    infer(model, batch())
    assert verdicts(mine) == verdicts(everything) == [(0, "Switch output", "origin")]


def test_watch_judges_what_is_left():
    model = Switch()
    model.bad = True
    optimizer = sgd(model)
    with pytest.warns(NonFiniteWarning, match="Switch output"), nanscan.watch(model) as monitor:
        model(batch())
    assert verdicts(monitor) == [(0, "Switch output", "origin")]
    assert optimizer is not None


def test_watch_lets_the_error_of_its_block_through_and_still_speaks():
    model = Switch()
    model.bad = True
    optimizer = sgd(model)

    def block():
        with nanscan.watch(model, action="raise") as monitor:
            monitors.append(monitor)
            model(batch())
            return 1 / 0

    monitors = []
    with (
        pytest.warns(NonFiniteWarning, match="Switch output"),
        pytest.raises(ZeroDivisionError),
    ):
        block()
    assert len(monitors[0].findings) == 1
    assert optimizer is not None


def test_a_closed_monitor_dies_with_its_last_reference():
    model = Net()
    monitor = nanscan.enable(model)
    train(model, sgd(model), [batch()])
    monitor.close()
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


def test_an_enabled_monitor_does_not_keep_its_model_alive():
    model = Net()
    monitor = nanscan.enable(model)
    infer(model, batch())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert monitor.findings == []


# -- questions to a monitor ------------------------------------------------------------------------


def test_history():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    monitor = nanscan.enable(model, history=3, action="log")
    for value in (1.0, -2.0, 3.0, NAN, 5.0):
        infer(model, torch.tensor([[value], [value + 1]]))
    history = monitor.history(Site("Linear", "output"))
    assert set(history) == {"step", "calls", "nan", "posinf", "neginf", "min", "max", "absmax"}
    assert history["step"].tolist() == [2, 3, 4]
    assert history["calls"].tolist() == [1, 1, 1]
    assert history["nan"].tolist() == [0, 2, 0]
    assert history["posinf"].tolist() == history["neginf"].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(history["min"], [3.0, NAN, 5.0])
    np.testing.assert_array_equal(history["max"], [4.0, NAN, 6.0])
    np.testing.assert_array_equal(history["absmax"], [4.0, NAN, 6.0])
    history["max"][:] = 0
    assert monitor.history(Site("Linear", "output"))["max"][0] == 4.0
    finding = monitor.findings[0]
    infer(model, *[torch.zeros(2, 1)] * 5)
    assert finding.history["step"].tolist() == [1, 2, 3]


def test_history_of_a_site_that_is_called_now_and_then():
    model = Net()
    monitor = nanscan.enable(model)
    infer(model, batch())
    infer(model.fc1, batch(), batch())
    infer(model, batch())
    assert monitor.history(Site("fc1", "output"))["step"].tolist() == [0, 1, 2, 3]
    assert monitor.history(Site("fc2", "output"))["step"].tolist() == [0, 3]


def test_history_of_an_unknown_site():
    monitor = nanscan.enable(Net())
    with pytest.raises(KeyError, match="nothing was scanned at 'nowhere output'"):
        monitor.history(Site("nowhere", "output"))


def test_coverage():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.attend(x, x, x)[0]

    model = Partly()
    monitor = nanscan.enable(model)
    before = monitor.coverage()
    assert before.sites == ()
    assert before.not_called == ("Partly", "attend", "attend.out_proj", "unused")
    infer(model, batch())
    after = monitor.coverage()
    assert {field.name for field in dataclasses.fields(after)} == {
        *(
            "sites",
            "skipped",
            "not_called",
            "compiled",
            "left_out",
            "thinned",
            "overhead",
            "nbytes",
        ),
    }
    assert after.not_called == ("attend.out_proj", "unused")
    assert after.skipped == {}
    assert after.nbytes > 16 * 128 * len(after.sites)
    assert {
        "Partly input[0]",
        "attend output[0]",
        "attend output[1]",
        "attend.in_proj_weight param",
        "unused.weight param",
    } <= set(after.sites)


def test_healthy():
    model = Switch()
    monitor = nanscan.enable(model, action="log")
    assert monitor.healthy is None  # nothing was scanned
    for bad in (True, False):
        model.bad = bad
        infer(model, batch())
        assert monitor.healthy is True  # an output leaves nothing in a checkpoint
    assert [finding.verdict for finding in monitor.findings] == ["origin", "recovered"]


def test_a_bad_parameter_is_unhealthy_until_it_is_good_again():
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="log")
    train(model, optimizer, [batch()])
    model.fc2.bias.data[0] = NAN
    train(model, optimizer, [batch()])
    assert not monitor.healthy
    infer(model.fc1, batch())  # clean in itself
    assert not monitor.healthy
    for parameter in model.parameters():
        nn.init.constant_(parameter.data, 0.1)
    train(model, optimizer, [batch()])
    train(model, optimizer, [batch()])
    assert monitor.healthy


def test_poll_gives_each_finding_once():
    model = Switch()
    monitor = nanscan.enable(model, action="log")
    infer(model, batch())
    assert monitor.poll() == []
    model.bad = True
    infer(model, batch())
    assert monitor.poll() == monitor.findings != []
    assert monitor.poll() == []
    model.bad = False
    infer(model, batch())
    model.bad = True
    infer(model, batch())
    assert monitor.poll() == monitor.findings[1:]


def test_findings_are_a_copy():
    model = Switch()
    model.bad = True
    monitor = nanscan.enable(model, action="log")
    infer(model, batch())
    monitor.findings.clear()
    assert len(monitor.findings) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, TypeError, "expected a torch.nn.Module or None, got int"),
        ({"model": Net}, TypeError, "expected a torch.nn.Module or None, got type"),
        (
            {"kinds": ("output", "grads")},
            ValueError,
            "unknown kind 'grads'; kinds are input, output",
        ),
        ({"kinds": "wight"}, ValueError, "unknown kind 'wight'"),
        ({"ignore": ["kind:wight"]}, ValueError, "unknown kind in 'kind:wight'"),
        ({"ignore": [3]}, TypeError, "ignore takes names, dtypes or a function, got 3"),
        ({"max_skipped_steps": 1}, ValueError, "max_skipped_steps must be at least 2, got 1"),
        ({"action": "print"}, ValueError, "action must be 'warn', 'raise', 'log', a callable or"),
        ({"history": 0}, ValueError, "history must be a positive number of steps, got 0"),
        ({"history": 2.5}, ValueError, "history must be a positive number of steps, got 2.5"),
        ({"near_limit": 0}, ValueError, r"near_limit must be in \(0, 1\], got 0"),
        ({"near_limit": 1.5}, ValueError, r"near_limit must be in \(0, 1\], got 1.5"),
        ({"near_limit": NAN}, ValueError, r"near_limit must be in \(0, 1\], got nan"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=f"nanscan: {message}"):
        nanscan.enable(**options)
    with pytest.raises(error, match=f"nanscan: {message}"), nanscan.watch(**options):
        pass
    assert not module_hooks._global_forward_hooks


def test_an_action_of_a_wrong_type():
    with pytest.raises((TypeError, ValueError), match="action must be"):
        nanscan.enable(action=3)


def test_a_scaler_that_skips_every_step_does_not_hide_what_forward_makes():
    model = Gap(lambda x: x / 0)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    monitor = nanscan.enable(model, action="log")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert verdicts(monitor)[0] == (0, "fc2 input[0]", "origin")
    assert monitor.healthy is True  # no step was taken


def test_an_optimizer_of_another_model_does_not_keep_steps_from_ending():
    other = sgd(nn.Linear(1, 1))
    model = Net()
    monitor = nanscan.enable(model)
    for _ in range(2):
        model(batch())
    assert monitor.history(Site("fc1", "output"))["step"].tolist() == [0, 1]
    assert other.param_groups


def test_an_action_that_raises_is_called_once_an_episode():
    calls = []

    def action(finding):
        calls.append(finding)
        raise RuntimeError("stop")

    model = Gap(lambda x: x / 0)
    nanscan.enable(model, action=action)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="stop"):
            model(batch())
        model(batch())
    assert len(calls) == 1


def test_a_monitor_and_its_coverage_show_what_they_are():
    model = Net()
    with nanscan.watch(model, action="log", exclude="act") as monitor:
        assert repr(monitor) == "<nanscan.Monitor of Net: step 0, 0 sites, 0 findings>"
        infer(model, batch())
        assert monitor.steps == 1
        assert repr(monitor).startswith("<nanscan.Monitor of Net: step 1, ")
        text = str(monitor.coverage())
        assert text.splitlines()[0].startswith(f"{len(monitor.coverage().sites)} sites scanned, ")
        assert "left out: act" in text
    assert repr(monitor).endswith(", closed>")


def test_history_takes_the_text_that_reports_print_and_suggests_names():
    model = Net()
    with nanscan.watch(model) as monitor:
        infer(model, batch(), batch(1))
        assert monitor.history("fc1 output")["step"].tolist() == [0, 1]
        with pytest.raises(KeyError, match="did you mean 'fc1 output'"):
            monitor.history("fc1 outptu")


def test_findings_and_options_are_frozen():
    model = Net()
    with nanscan.watch(model, action="log") as monitor:
        infer(model, set_nan(batch()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        monitor.findings[0].verdict = "origin"
