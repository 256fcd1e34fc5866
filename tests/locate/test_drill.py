"""enable(locate=True): after a finding, the next steps are searched op by op; and replays."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import nanscan
from helpers.located import marked
from helpers.models import hook_dicts, no_trace


class Logs(nn.Module):
    """log(relu(a(x)) + eps): -Inf where eps is 0, and NaN in what follows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.eps = 1e-3

    def forward(self, x):
        h = self.a(x).relu()
        h = torch.log(h + self.eps)  # the log
        return self.b(h)


LINE = marked(Logs, "the log")


def train(model, steps, *, bad_from, bad_until=10**9):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        model.eps = 0.0 if bad_from <= step < bad_until else 1e-3
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
        yield step


def run(model, steps, **bad):
    for _ in train(model, steps, **bad):
        pass


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Logs()


def test_the_next_step_names_the_op(model):
    told = []
    with nanscan.watch(model, locate=True, skip_step=True, action=told.append) as monitor:
        run(model, 6, bad_from=3)
    finding = monitor.findings[0]
    assert (finding.step, finding.verdict, str(finding.site)) == (3, "origin", "b input[0]")
    located = monitor.located[0]
    location = located.location
    assert (location.op, location.step, location.module) == ("aten.log.default", 4, "Logs")
    assert (location.file, location.line) == (__file__, LINE)
    assert location.consequence.name == "aten.addmm.default"
    assert [event is other for event, other in zip(told, (finding, located), strict=True)] == [
        True
    ] * 2
    assert located.finding is finding
    assert str(located).startswith("why b input[0] went bad in step 3: aten.log.default made")


def test_the_monitor_is_cheap_again_afterwards(model):
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        depths = [_len_torch_dispatch_stack() for _ in train(model, 7, bad_from=2)]
        # Entered when step 2 ends, located in step 3, left when that is over.
        assert depths == [0, 0, 1, 0, 0, 0, 0]
        assert monitor.located


def test_poisoned_weights_want_a_replay(model, tmp_path):
    with nanscan.watch(model, locate=True, save_dir=tmp_path, action=lambda _: None) as monitor:
        run(model, 6, bad_from=3)
    located = monitor.located[0]
    assert located.location.verdict == "propagated"
    assert "a.weight" in [operand.what for operand in located.location.operands]
    saved = tmp_path / "step-3-rank-0"
    assert f"nanscan.replay({str(saved)!r}, model, step_fn)" in located.replay

    def step_fn(model, x):
        model.eps = 0.0
        model(x).pow(2).mean().backward()

    location = nanscan.replay(saved, model, step_fn)
    assert (location.op, location.line, location.verdict) == ("aten.log.default", LINE, "origin")
    assert location.step == 3
    assert torch.isfinite(model.a.weight).all()  # as it was in that step


def test_without_a_folder_the_hint_says_how_to_get_one(model):
    with nanscan.watch(model, locate=True, action=lambda _: None) as monitor:
        run(model, 6, bad_from=3)
    assert 'enable(..., save_dir="bad/")' in monitor.located[0].replay


def test_a_fault_that_does_not_come_back_ends_the_search(model, caplog):
    caplog.set_level("INFO", "nanscan")
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        run(model, 25, bad_from=3, bad_until=4)
        assert _len_torch_dispatch_stack() == 0
    assert monitor.located == []
    assert "searched the steps after step 3 op by op" in caplog.text


def test_warnings_tell_of_both(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nanscan.watch(model, locate=True, skip_step=True):
            run(model, 6, bad_from=3)
    texts = [str(w.message) for w in caught if w.category is nanscan.NonFiniteWarning]
    assert len(texts) == 2
    assert "located" not in texts[0]
    assert "aten.log.default" in texts[1]


def test_raise_raises_once(model):
    raised = []
    with (
        warnings.catch_warnings(record=True) as caught,
        nanscan.watch(model, locate=True, skip_step=True, action="raise") as monitor,
    ):
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(8):
            model.eps = 0.0 if step >= 3 else 1e-3
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            try:
                optimizer.step()
            except nanscan.NonFiniteError as error:
                raised.append((step, error.finding))
    assert [step for step, _ in raised] == [3]
    assert monitor.located[0].location.op == "aten.log.default"
    assert raised[0][1] is monitor.findings[0]
    assert ["aten.log.default" in str(w.message) for w in caught] == [True]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_around_a_step_puts_the_search_off(model):
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        steps = train(model, 8, bad_from=2)
        with Passing():
            for _ in range(4):
                next(steps)
            assert _len_torch_dispatch_stack() == 1
        assert monitor.located == []
        for _ in steps:
            pass
    assert monitor.located[0].location.op == "aten.log.default"


def test_a_mode_of_the_users_that_outlasts_the_search_stays(model):
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        steps = train(model, 8, bad_from=2)
        for _ in range(3):
            next(steps)
        assert _len_torch_dispatch_stack() == 1
        with Passing() as mine:
            next(steps)
            assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [mine]
        assert _len_torch_dispatch_stack() == 0
    assert monitor.located[0].location.op == "aten.log.default"


@pytest.mark.parametrize("end", ["close", "pause"])
def test_closing_amid_a_search_leaves_nothing(model, end):
    monitor = nanscan.enable(model, locate=True, skip_step=True, action=lambda _: None)
    for _ in train(model, 3, bad_from=2):
        pass
    assert _len_torch_dispatch_stack() == 1
    getattr(monitor, end)()
    assert _len_torch_dispatch_stack() == 0
    monitor.close()


def test_inference(model):
    model.eps = 0.0
    torch.manual_seed(0)
    with (
        torch.no_grad(),
        nanscan.watch(model, locate=True, action=lambda _: None) as monitor,
    ):
        for _ in range(3):
            model(torch.randn(8, 4))
    assert monitor.located[0].location.op == "aten.log.default"


def test_results_are_bit_identical_while_it_searches():
    def weights(**options):
        torch.manual_seed(0)
        model = Logs()
        with nanscan.watch(model, skip_step=True, action=lambda _: None, **options):
            run(model, 8, bad_from=2, bad_until=3)
        return [p.detach().clone() for p in model.parameters()]

    for ours, theirs in zip(weights(locate=True), weights(), strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_kept_alive():
    model = Logs()
    with no_trace():
        monitor = nanscan.enable(model, locate=True, skip_step=True, action=lambda _: None)
        run(model, 5, bad_from=2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert monitor.located
    assert alive() is None


def test_unknown_ways_are_refused(model):
    with pytest.raises(TypeError, match="locate must be True or False, got 'next'"):
        nanscan.enable(model, locate="next")


def test_a_replay_of_nothing(model, tmp_path):
    with pytest.raises(FileNotFoundError):
        nanscan.replay(tmp_path, model)


@pytest.mark.parametrize("is_global_first", [False, True])
def test_two_monitors_search_one_after_the_other(model, is_global_first):
    targets = [None, model] if is_global_first else [model, None]
    options = {"locate": True, "skip_step": True, "action": lambda _: None}
    with no_trace():
        monitors = [nanscan.enable(target, **options) for target in targets]
        run(model, 40, bad_from=3)
        assert _len_torch_dispatch_stack() == 0
        ops = [monitor.located[0].location.op for monitor in monitors]
    assert ops == ["aten.log.default"] * 2


@pytest.mark.parametrize("when", [1, 2])  # when it is found, and when it is located
def test_an_action_may_close_the_monitor(model, when):
    told = []

    def action(finding):
        told.append(finding)
        if len(told) == when:
            monitor.close()

    with no_trace():
        monitor = nanscan.enable(model, locate=True, skip_step=True, action=action)
        run(model, 8, bad_from=3)
    assert len(told) == when
    assert _len_torch_dispatch_stack() == 0


def test_a_search_does_not_end_with_its_thread(model):
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        thread = threading.Thread(target=run, args=(model, 4), kwargs={"bad_from": 3})
        thread.start()
        thread.join()
        run(model, 4, bad_from=0)
    assert monitor.located[0].location.op == "aten.log.default"


def test_other_threads_are_none_of_its_business(model):
    other = Logs()
    other.eps = 0.0

    def infer():
        with torch.no_grad():
            other(torch.randn(8, 4))

    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        run(model, 4, bad_from=3)
        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()
        run(model, 1, bad_from=1)
    assert monitor.located == []


@pytest.mark.parametrize("target", ["model", "global"])
def test_inference_mode_that_a_step_enters_and_leaves(model, target):
    model.eps = 0.0
    torch.manual_seed(0)
    with nanscan.watch(
        model if target == "model" else None, locate=True, action=lambda _: None
    ) as monitor:
        for _ in range(3):
            with torch.inference_mode():
                model(torch.randn(8, 4))
            assert _len_torch_dispatch_stack() == 0
    location = monitor.located[0].location
    assert (location.op, location.line) == ("aten.log.default", LINE)
    assert location.reached == "what the model returned"


def test_a_search_that_is_over_amid_inference_mode(model):
    model.eps = 0.0
    with nanscan.watch(model, locate=True, action=lambda _: None) as monitor:
        with torch.no_grad():
            model(torch.randn(8, 4))
        with torch.inference_mode():
            model(torch.randn(8, 4))
        assert monitor.located
        assert torch.randn(2).isfinite().all()  # it raised, of a mode that was not there
        with torch.no_grad():
            model(torch.randn(8, 4))
        assert _len_torch_dispatch_stack() == 0


def test_optimizers_that_step_in_a_backward(model):
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None) as monitor:
        for number in range(8):
            model.eps = 0.0 if number >= 3 else 1e-3
            model(torch.randn(8, 4)).pow(2).mean().backward()
        assert _len_torch_dispatch_stack() == 0
    assert monitor.located[0].location.op == "aten.log.default"


def test_searches_take_a_bounded_share_of_the_steps(model):
    searched = 0
    with nanscan.watch(model, locate=True, skip_step=True, action=lambda _: None):
        for step in range(300):
            for _ in train(model, 1, bad_from=step % 20):
                pass
            searched += _len_torch_dispatch_stack()
    assert 20 < searched < 90  # a fault that comes and goes is not searched each time


def test_a_replay_with_another_model_is_refused(model, tmp_path):
    with nanscan.watch(model, save_dir=tmp_path, action=lambda _: None):
        run(model, 5, bad_from=3)
    with pytest.raises(RuntimeError, match=r"only one of them has 0\.bias"):
        nanscan.replay(tmp_path / "step-3-rank-0", nn.Sequential(nn.Linear(4, 4)))


def test_a_run_without_faults_is_not_touched(model):
    def hooks(**options):
        with nanscan.watch(model, **options):
            run(model, 3, bad_from=9)
            assert _len_torch_dispatch_stack() == 0
            return {key: len(value) for key, value in hook_dicts(model).items()}

    assert hooks(locate=True) == hooks()
