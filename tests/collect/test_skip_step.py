"""The option `skip_step`: an optimizer does not take a step with a bad gradient."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanscan
from helpers.models import (
    INF,
    NAN,
    SCOPES,
    Do,
    Net,
    batch,
    enable,
    run_quiet,
    set_nan,
    sgd,
    train,
    verdicts,
)
from helpers.optimizers import Learner, bits
from nanscan import NonFiniteError
from nanscan._collect import skip_step
from nanscan._collect.table import Table

# -- steps that are not taken ----------------------------------------------------------------------

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
)
VARIANTS = [
    *[(name, {}) for name in OPTIMIZERS],
    *[
        (name, {option: True})
        for name in OPTIMIZERS
        for option in ("foreach", "fused", "amsgrad", "maximize")
        if option in inspect.signature(getattr(torch.optim, name)).parameters
    ],
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adam", {"foreach": False, "weight_decay": 0.1}),
    ("LBFGS", {"line_search_fn": "strong_wolfe"}),
]


def optimizers(variants):
    names = [f"{name}-{'-'.join(options)}" for name, options in variants]
    return pytest.mark.parametrize(("name", "options"), variants, ids=names)


EVERY_OPTIMIZER = optimizers(VARIANTS)
EVERY_OTHER_OPTIMIZER = optimizers([v for v in VARIANTS if v[0] != "LBFGS"])  # it wants a closure


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("before", "bad"), [(0, NAN), (2, -INF)])
def test_a_skipped_step_leaves_every_bit_as_it_was(name, options, before, bad):
    learner, other = Learner(name, options), Learner(name, options)
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    for seed in range(before):
        learner.step(seed)
        other.step(seed)
    start = learner.state()
    assert start == other.state()
    learner.step(7, bad)
    assert learner.state() == start
    assert not all(p.grad is None for p in learner.parameters)
    assert verdicts(monitor) == [(before, str(monitor.findings[0].site), "origin")]
    assert monitor.findings[0].site.kind == "grad"
    for seed in range(10, 13):
        learner.step(seed)
        other.step(seed)
        assert learner.state() == other.state()
    assert learner.state() != start
    assert monitor.healthy
    assert [f.verdict for f in monitor.findings] == ["origin", "recovered"]


@EVERY_OTHER_OPTIMIZER
def test_without_skip_step_the_same_step_is_taken(name, options):
    learner = Learner(name, options)
    nanscan.enable(learner.model, action="log")
    learner.step(0)
    start = learner.state()
    learner.step(7, NAN)
    assert learner.state() != start


@EVERY_OTHER_OPTIMIZER
def test_a_closure_makes_the_gradients_that_count(name, options):
    learner, other = Learner(name, options), Learner(name, options)
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")

    def step(of, seed, bad, keyword):
        def closure():
            assert torch.is_grad_enabled()
            of.optimizer.zero_grad()
            of.set_gradients(seed, bad)
            return seed

        assert (
            of.optimizer.step(closure=closure) if keyword else of.optimizer.step(closure)
        ) == seed

    for seed, keyword in ((0, False), (1, True)):
        step(learner, seed, None, keyword)
        step(other, seed, None, keyword)
        start = learner.state()
        assert start == other.state()
        step(learner, 7, INF, keyword)
        assert learner.state() == start
    # What the bad step left in .grad is none of the next one's: its closure makes its own.
    assert [f.verdict for f in monitor.findings] == ["origin", "recovered", "origin"]


def test_of_two_calls_of_a_closure_the_last_counts():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    model = Net()
    optimizer = Twice(model.parameters())
    nanscan.enable(model, skip_step=True, action="log")
    for first, second in ((NAN, 1.0), (1.0, NAN), (1.0, 1.0)):
        values = iter((first, second))
        before = bits(model.state_dict())

        def closure(values=values):
            value = next(values)
            for p in model.parameters():
                p.grad = torch.full_like(p, value)

        optimizer.step(closure)
        assert (bits(model.state_dict()) == before) == (second is NAN)


def test_a_model_that_first_runs_in_a_closure_has_its_names():
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(skip_step=True, action="log")

    def closure():
        loss = model(batch()).sum()
        loss.backward()
        model.fc1.bias.grad[0] = NAN
        return loss

    before = bits(model.state_dict())
    optimizer.step(closure)
    assert bits(model.state_dict()) == before
    assert verdicts(monitor) == [(0, "fc1.bias grad", "origin")]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad_call", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_of_lbfgs_is_taken_back(search, bad_call, before):
    learner, other = (Learner("LBFGS", {"line_search_fn": search}) for _ in range(2))
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    for of in (learner, other):
        for seed in range(before):
            of.lbfgs_step(seed, None)
    start = learner.state()
    loss = learner.lbfgs_step(5, bad_call)
    assert torch.isfinite(loss)
    assert learner.state() == start
    assert learner.parameters[-1].grad.isnan().any()
    assert [f.verdict for f in monitor.findings] == ["origin"]
    for of in (learner, other):
        of.lbfgs_step(9, None)
    assert learner.state() == other.state()


@SCOPES
def test_a_run_with_a_bad_batch_equals_one_without_it(scope):
    def run(inputs, **options):
        torch.manual_seed(0)
        model = Net()
        monitor = enable(scope, model, action="log", **options)
        train(model, torch.optim.Adam(model.parameters(), 0.1), inputs)
        monitor.close()
        return model.state_dict(), monitor

    good = [batch(i) for i in range(4)]
    expected, _ = run(good)
    same, _ = run(good, skip_step=True)
    assert bits(same) == bits(expected)
    skipped, monitor = run([*good[:2], set_nan(batch(9)), *good[2:]], skip_step=True)
    assert bits(skipped) == bits(expected)
    assert monitor.findings[0].step == 2
    assert monitor.steps == 5
    spoilt, _ = run([*good[:2], set_nan(batch(9)), *good[2:]])
    assert not all(torch.isfinite(x).all() for x in spoilt.values())


def test_gradients_stay_the_very_same():
    learner = Learner("SGD", {})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.set_gradients(0, NAN)
    grads = [p.grad for p in learner.parameters]
    before = [(bits(g), g._version) for g in grads]
    learner.optimizer.step()
    assert all(p.grad is g for p, g in zip(learner.parameters, grads, strict=True))
    assert [(bits(g), g._version) for g in grads] == before


def test_a_bad_activation_alone_skips_nothing():
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, skip_step=True, action="log")
    before = bits(model.state_dict())
    model(batch()).sum().backward()
    nanscan.probe("bad", set_nan(batch()))
    optimizer.step()
    assert [f.site.kind for f in monitor.findings] == ["probe"]
    assert bits(model.state_dict()) != before


def test_only_the_optimizer_with_the_bad_gradient_is_kept_from_its_step():
    model = Net()
    first, second = sgd(model.fc1), sgd(model.fc2)
    nanscan.enable(model, skip_step=True, action="log")
    model(batch()).sum().backward()
    model.fc2.bias.grad[0] = INF
    before = bits(model.fc1.state_dict()), bits(model.fc2.state_dict())
    first.step()
    second.step()
    assert bits(model.fc1.state_dict()) != before[0]
    assert bits(model.fc2.state_dict()) == before[1]


def test_within_one_step_of_the_user_each_step_is_judged_by_itself():
    """A row that is bad stays so until the step ends, and later gradients may be fine."""
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    monitor.step()
    for bad in (NAN, None, INF, None):
        before = learner.state()["parameters"]
        learner.step(1, bad)
        assert (learner.state()["parameters"] == before) == (bad is not None)
    monitor.step()
    assert [f.step for f in monitor.findings] == [1]


def test_what_a_scaler_saw_bad_in_the_same_step_counts_as_well():
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    monitor.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    learner.set_gradients(0, INF)
    scaler.step(learner.optimizer)  # which skips by itself
    before = learner.state()
    learner.step(1, INF)
    assert learner.state() == before


def test_clean_steps_are_not_scanned_twice(monkeypatch):
    """With a mask that goes in at each step, which takes a ticket as well."""
    monkeypatch.setattr(skip_step, "_any_nonfinite", lambda tensors: pytest.fail("a second scan"))
    model = Do(lambda x, mask: x.sum() + mask.exp().sum())
    model.fc = nn.Linear(4, 4)
    model.function = lambda x, mask: (model.fc(x) + mask).softmax(-1)[:, :2].sum()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, skip_step=True)
    mask = torch.tensor([0.0, 0.0, -INF, 0.0])
    for i in range(3):
        model(batch(i), mask).backward()
        optimizer.step()
    assert monitor._table.last_ticket > 0
    assert monitor.findings == []


@pytest.mark.parametrize("options", [{"every_n_steps": 5}, {"warmup_steps": 9}])
def test_gradients_count_in_steps_that_scan_nothing_else(options):
    model = Net()
    monitor = nanscan.enable(model, skip_step=True, action="log", **options)
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    before = bits(model.state_dict())
    train(model, optimizer, [set_nan(batch())])
    assert bits(model.state_dict()) == before
    assert monitor.findings[0].site.kind == "grad"
    train(model, optimizer, [batch()])
    assert bits(model.state_dict()) != before


def test_what_is_ignored_is_no_reason_to_skip():
    learner = Learner("SGD", {})
    nanscan.enable(learner.model, skip_step=True, action="log", ignore="fc2.*")
    before = learner.state()
    learner.step(0, NAN)
    assert learner.state() != before


def test_gradients_of_no_watched_model_are_no_reason_to_skip():
    learner = Learner("SGD", {})
    nanscan.enable(Net(), skip_step=True, action="log")
    before = learner.state()
    learner.step(0, NAN)
    assert learner.state() != before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_every_type_count(dtype):
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = sgd(model)
    nanscan.enable(model, skip_step=True, action="log")
    for bad in (NAN, None):
        model.p.grad = torch.full((5,), 1e4, dtype=dtype)
        if bad:
            model.p.grad[2] = complex(0, bad) if dtype.is_complex else bad
        before = bits(model.p)
        optimizer.step()
        assert (bits(model.p) == before) == bool(bad)


def test_empty_and_missing_gradients_do_no_harm():
    model = nn.Module()
    model.p = nn.Parameter(torch.ones(0))
    model.q = nn.Parameter(torch.ones(3))
    model.r = nn.Parameter(torch.ones(2))
    optimizer = sgd(model)
    nanscan.enable(model, skip_step=True, action="log")
    model.p.grad, model.q.grad = torch.ones(0), torch.tensor([1.0, NAN, 1.0])
    optimizer.step()
    assert model.q.tolist() == [1, 1, 1]


def test_the_action_raise_raises_with_the_parameters_unharmed():
    learner = Learner("Adam", {})
    monitor = nanscan.enable(learner.model, skip_step=True, action="raise")
    before = learner.state()
    with pytest.raises(NonFiniteError):
        learner.step(0, NAN)
    assert learner.state() == before
    assert monitor.steps == 1


def test_hooks_of_the_user_that_raise_find_everything_as_it_was():
    learner = Learner("Adam", {"fused": True})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    before = learner.state()

    def raises(optimizer, args, kwargs):
        raise KeyError("mine")

    for register in ("register_step_pre_hook", "register_step_post_hook"):
        handle = getattr(learner.optimizer, register)(raises)
        with pytest.raises(KeyError, match="mine"):
            learner.step(1, NAN)
        handle.remove()
        assert learner.state() == before
        assert all(p.grad is not None for p in learner.parameters)
    learner.step(2)
    assert learner.state() != before


@pytest.mark.parametrize("when", ["pre", "closure", "post"])
def test_disable_in_between_leaves_nothing(when):
    learner = Learner("SGD", {"momentum": 0.9})
    nanscan.enable(learner.model, skip_step=True, action="log")
    disable = lambda *_: nanscan.disable()
    before = learner.state()
    if when == "closure":
        learner.optimizer.step(lambda: (learner.set_gradients(0, NAN), nanscan.disable()))
    else:
        getattr(learner.optimizer, f"register_step_{when}_hook")(disable)
        learner.step(0, NAN)
    assert learner.state() == before
    learner.step(0, NAN)
    assert learner.state() != before


def test_two_monitors_skip_for_each_other():
    model = nn.Sequential(Net(), Net())
    optimizer = sgd(model, momentum=0.9)
    for order in ((0, 1), (1, 0)):
        for i in order:
            nanscan.enable(model[i], skip_step=True, action="log")
        for bad in (0, 1, None):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            if bad is not None:
                model[bad].fc1.bias.grad[0] = NAN
            before = bits(model.state_dict())
            optimizer.step()
            assert (bits(model.state_dict()) == before) == (bad is not None)
            optimizer.step(lambda: 1)
            assert (bits(model.state_dict()) == before) == (bad is not None)
        nanscan.disable()
    assert not [key for key in vars(optimizer) if "nanscan" in key]


class Counting(torch.optim.Adam):
    """A subclass that runs its base's step inside of its own, and counts on itself."""

    count = 0

    def step(self, closure=None):
        self.count = self.count + 1
        assert isinstance(self, Counting)
        return super().step(closure)


def test_a_subclass_that_calls_its_base_is_kept_from_its_step_too():
    model = Net()
    torch.optim.Adam(model.parameters())  # from now on the base's step runs hooks of its own
    optimizer = Counting(model.parameters())
    monitor = nanscan.enable(model, skip_step=True, action="log")
    for number, bad in enumerate((False, True, False)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if bad:
            model.fc1.bias.grad[1] = NAN
        before = bits(model.state_dict()), optimizer.count
        optimizer.step()
        assert (bits(model.state_dict()) == before[0]) == bad
        assert optimizer.count == before[1] + (not bad)
        assert monitor.steps == number + 1
    assert monitor.findings[0].step == 1
    optimizer.step(lambda: model.fc1.bias.grad.fill_(1))  # what it sets on a stand-in, it keeps
    assert optimizer.count == 3


def test_a_step_that_raises_leaves_gradients_and_hooks():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise OSError("mine")

    model = Net()
    optimizer = Broken(model.parameters())
    nanscan.enable(model, skip_step=True, action="log")
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, NAN)
        before = bits(model.state_dict())
        with pytest.raises(OSError, match="mine"):
            optimizer.step()
        assert bits(model.state_dict()) == before
        assert all(p.grad.isnan().all() for p in model.parameters())


def test_no_gradients_no_skip_step():
    with pytest.raises(ValueError, match="grad"):
        nanscan.enable(Net(), skip_step=True, kinds=("output",))
    with pytest.raises(TypeError, match="skip_step"):
        nanscan.enable(Net(), skip_step="yes")


# -- with a GradScaler, and as on a device ---------------------------------------------------------


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Lets CPU tensors be taken for such that the host knows nothing of without waiting."""
    monkeypatch.setattr(skip_step, "_is_on_host", lambda x: False)
    monkeypatch.setattr(Table, "on_device", True)


FUSED = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adagrad", {}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_a_scaler_skips_by_itself_too(fused, device, request):
    if device:
        request.getfixturevalue("as_on_a_device")
    learner = Learner("Adam", {"fused": fused})
    monitor = nanscan.enable(learner.model, skip_step=True, action="log")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales = []
    for bad in (None, INF, None, NAN, None):
        scaler.scale(torch.zeros(()))
        learner.set_gradients(3, bad)
        before = learner.state()
        scaler.step(learner.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = learner.state()
        assert (after["parameters"] == before["parameters"]) == (bad is not None)
        assert after["attributes"] == before["attributes"]
        if bad is not None:
            assert after == before
    assert scales == [64, 32, 32, 16, 16]
    assert monitor.steps == 5
    scaler.scale(torch.zeros(()))
    learner.set_gradients(3, None)
    scaler.unscale_(learner.optimizer)
    learner.parameters[0].grad[0] = NAN  # after the scaler looked
    before = learner.state()
    scaler.step(learner.optimizer)
    assert learner.state() == before


class Syncs(TorchDispatchMode):
    """Counts how often the host reads a tensor's value."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def takes_found_inf(learner):
    """Adagrad does not in every version of torch."""
    return getattr(learner.optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_optimizers_skip_without_a_sync(name, options, as_on_a_device):
    """The path for CUDA tensors, which torch's fused kernels have on the CPU too."""
    learner, other = (Learner(name, {"fused": True, **options}) for _ in range(2))
    nanscan.enable(learner.model, skip_step=True, action="log")
    for number, bad in enumerate((NAN, None, None, INF, None, NAN)):
        before = learner.state()
        with Syncs() as syncs:
            learner.step(number, bad)
        makes_state = number < 2 and not (name == "SGD" and not options) and name != "Adagrad"
        assert syncs.count == (makes_state or not takes_found_inf(learner))
        if bad is None:
            other.step(number)
        else:
            assert learner.state() == before
        assert learner.state()["parameters"] == other.state()["parameters"]
        assert learner.state()["state"] == other.state()["state"]
        assert "found_inf" not in learner.state()["attributes"]


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_optimizers_skip_without_a_sync_in_closures(name, options, as_on_a_device):
    learner = Learner(name, {"fused": True, **options})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    for bad in (NAN, None):
        before = learner.state()
        with Syncs() as syncs:
            learner.optimizer.step(lambda bad=bad: learner.set_gradients(1, bad))
        assert syncs.count == (not takes_found_inf(learner))
        assert (learner.state() == before) == bool(bad)
        assert learner.state()["attributes"] == before["attributes"]


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Rprop"])
def test_other_optimizers_skip_with_one_sync(name, as_on_a_device):
    learner = Learner(name, {"foreach": True})
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    own = []
    for bad in (None, NAN, None):
        before = learner.state()
        with Syncs() as syncs:
            learner.step(1, bad)
        own.append(syncs.count)
        assert (learner.state() == before) == bool(bad)
    nanscan.disable()
    with Syncs() as syncs:
        learner.step(1)
    assert own == [syncs.count + 1, 1, syncs.count + 1]


def test_what_the_scaler_saw_stays(as_on_a_device):
    """Though all is fine in what is watched."""
    learner = Learner("Adam", {"fused": True})
    nanscan.enable(learner.model, skip_step=True, action="log", ignore="fc2.bias")
    learner.step(0)
    scaler = torch.amp.GradScaler("cpu")
    for bad in (INF, None):
        scaler.scale(torch.zeros(()))
        learner.set_gradients(1, bad)  # in fc2.bias
        before = learner.state()
        scaler.step(learner.optimizer)
        scaler.update()
        assert (learner.state() == before) == bool(bad)


def test_the_flag_alone_is_no_promise(as_on_a_device):
    """Others than torch's own may want found_inf as an argument, or not at all."""
    learner = Learner("RMSprop", {})
    learner.optimizer._step_supports_amp_scaling = True
    nanscan.enable(learner.model, skip_step=True, action="log")
    learner.step(0)
    before = learner.state()
    learner.step(1, NAN)
    assert learner.state() == before


def test_a_run_on_a_device(device):
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monitor = nanscan.enable(model, skip_step=True, action="log")
    train(model, optimizer, [batch(i).to(device) for i in range(2)])
    before = bits(model.state_dict())
    train(model, optimizer, [set_nan(batch(3)).to(device)])
    assert bits(model.state_dict()) == before
    monitor.flush()
    assert monitor.findings[0].step == 2
    train(model, optimizer, [batch(4).to(device)])
    monitor.flush()
    assert monitor.healthy


# -- before a checkpoint ---------------------------------------------------------------------------


def test_only_healthy_models_become_checkpoints(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    monitor = nanscan.enable(model, action="log", skip_step=True)

    def save_checkpoint(path):
        monitor.flush()  # judges all that was scanned; waits for a GPU's last steps
        if monitor.healthy:
            torch.save(model.state_dict(), path)

    for step, x in enumerate([batch(0), set_nan(batch(1)), batch(2), batch(3)]):
        train(model, optimizer, [x])
        if step == 2:  # other code spoils a parameter, and repairs it
            model.fc1.bias.data[0] = NAN
            run_quiet(model, batch(4))
        save_checkpoint(tmp_path / f"{step}.pt")
        model.fc1.bias.data.nan_to_num_(0.1)
    # A skipped step leaves the parameters as they were.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "3.pt"]
    for path in tmp_path.iterdir():
        assert all(x.isfinite().all() for x in torch.load(path).values())
