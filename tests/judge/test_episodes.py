"""Episodes: a fault of its own is told while another goes on; what is harmless is not."""

import logging
import sysconfig
import warnings

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import INF, NAN, SCOPES, Do, Net, batch, enable, infer, set_nan, sgd, train
from nanscan import _monitor


def watch(scope, model, **options):
    """A monitor, and what it tells: (step, site, verdict) of each fault."""
    told = []

    def act(finding):
        if finding.is_fault:
            told.append((finding.step, str(finding.site), finding.verdict))

    return enable(scope, model, action=act, **options), told


class Imputes(nn.Module):
    """Replaces missing features."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.net(torch.nan_to_num(x))


# -- notes -----------------------------------------------------------------------------------------


@SCOPES
def test_a_fault_beside_bad_data_that_the_model_repairs(scope):
    model = Imputes()
    monitor, told = watch(scope, model)
    optimizer = sgd(model)
    train(model, optimizer, [set_nan(batch(seed)) for seed in range(3)])
    assert told == []
    assert monitor.healthy is True
    assert [f.verdict for f in monitor.findings] == ["absorbed"]
    train(model, optimizer, [set_nan(batch(3))], lambda out: (out * 0).sqrt().sum())
    train(model, optimizer, [set_nan(batch(4))])
    assert told == [(3, "net.weight grad", "origin")]
    assert monitor.healthy is False


@SCOPES
def test_bad_data_that_reaches_the_loss_by_another_way(scope):
    """An autoencoder repairs its input; its loss compares with the raw one."""
    model = Imputes()
    _, told = watch(scope, model)
    x = set_nan(batch())
    train(model, sgd(model), [x], lambda out: (out - x).square().mean())
    assert told == [(0, "Imputes input[0]", "propagated")]


@SCOPES
def test_bad_data_that_only_a_gradient_shows(scope):
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return torch.where(x.isnan(), 0.0, x * self.scale)

    model = Masks()
    _, told = watch(scope, model)
    train(model, sgd(model), [batch(), set_nan(batch(1))])
    assert told == [(1, "Masks input[0]", "propagated")]


@SCOPES
@pytest.mark.parametrize("limit", [INF, -INF])
def test_infinite_bounds_are_silent(scope, limit):
    class Bounded(nn.Module):
        def forward(self, x, bound):
            return x.minimum(bound) if limit > 0 else x.maximum(bound)

    model = Bounded()
    monitor, told = watch(scope, model)
    with torch.no_grad():
        for seed in range(2):
            model(batch(seed), torch.full((4,), limit))
    assert told == []
    assert len(monitor.findings) <= 1  # a note of +Inf


# -- one fault beside another ----------------------------------------------------------------------


class Two(nn.Module):
    """Two layers beside each other, each of which can be made to fail."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Do(self._left), Do(self._right)
        self.bad = set()

    def _left(self, x):
        return x / 0 if "left" in self.bad else x * 1

    def _right(self, x):
        return x / 0 if "right" in self.bad else x * 1

    def forward(self, x):
        return self.left(x), self.right(x)


def run(model, *steps):
    for bad in steps:
        model.bad = set(bad)
        infer(model, batch())


@SCOPES
def test_a_second_fault_is_told_while_the_first_goes_on(scope):
    model = Two()
    monitor, told = watch(scope, model)
    run(model, [], ["left"], ["left"], ["left", "right"], ["right"], [])
    assert told == [(1, "left output", "origin"), (3, "right output", "origin")]
    assert [(f.step, str(f.site)) for f in monitor.findings if f.verdict == "recovered"] == [
        (4, "left output"),
        (5, "right output"),
    ]
    assert [f.episode for f in monitor.findings if f.is_fault] == [1, 2]


def test_raise_raises_for_each_new_fault():
    model = Two()
    nanscan.enable(model, action="raise")
    raised = []
    for step, bad in enumerate([["left"], ["left"], ["left", "right"], ["right"]]):
        try:
            run(model, bad)
        except nanscan.NonFiniteError as error:
            raised.append((step, str(error.finding.site)))
    assert raised == [(0, "left output"), (2, "right output")]


@SCOPES
def test_what_goes_on_is_told_again_with_its_count(scope):
    model = Two()
    monitor, told = watch(scope, model)
    run(model, *[["left"]] * 310)
    assert [step for step, _, _ in told] == [0, 100, 300]
    again = [f for f in monitor.findings if f.news == "again"]
    assert "bad in 101 of the last 101 steps" in again[0].how
    assert "bad in 301 of the last 301 steps" in again[1].how
    assert len(monitor.findings) == 3


@SCOPES
def test_what_comes_and_goes_is_told_twice_then_at_intervals(scope):
    model = Two()
    monitor, told = watch(scope, model)
    run(model, *[["left"], []] * 60)
    assert [step for step, _, _ in told] == [0, 2, 102]
    news = [f for f in monitor.findings if f.news]
    assert "bad in 2 of the last 3 steps" in news[1].how
    assert "bad in 52 of the last 103 steps" in news[2].how
    assert len(monitor.findings) < 10
    run(model, ["right"])
    assert told[-1] == (120, "right output", "origin")


def test_a_fault_that_goes_on_raises_once():
    model = Two()
    nanscan.enable(model, action="raise")
    with pytest.raises(nanscan.NonFiniteError):
        run(model, ["left"])
    run(model, *[["left"]] * 99)
    with pytest.warns(nanscan.NonFiniteWarning, match="bad in 101 of the last 101 steps"):
        run(model, ["left"])


@SCOPES
def test_a_fault_of_another_request_of_a_batch(scope):
    """Sample 0 stays bad; sample 2 goes bad at a later layer, then sample 3 at the same place."""

    class Serves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Do(self._first), Do(self._second)
            self.bad = {"first": [], "second": []}

        def _spoil(self, x, name):
            x = x.clone()
            x[self.bad[name]] = NAN
            return x

        def _first(self, x):
            return self._spoil(x, "first")

        def _second(self, x):
            return self._spoil(x, "second")

        def forward(self, x):
            return self.second(self.first(x) + 1)

    model = Serves()
    monitor, told = watch(scope, model)
    for first, second in [([], []), *[([0], [])] * 2, ([0], [2]), ([0], [2]), ([0, 1], [2])]:
        model.bad = {"first": first, "second": second}
        infer(model, torch.randn(4, 8))
    assert told == [
        (1, "first output", "origin"),
        (3, "second output", "origin"),
        (5, "first output", "origin"),
    ]
    how = [f.how for f in monitor.findings if f.news]
    assert how[1] == "made here in sample 2 of 4, beside what was bad in the step before"
    assert how[2] == "made here in sample 1 of 4, beside what was bad in the step before"


@SCOPES
def test_a_cache_that_the_model_spoiled_is_no_bad_batch(scope):
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x, cache):
            cache[0] = x * self.scale / 0
            return cache.sum(0)

    model, cache = Caches(), torch.zeros(2, 4)
    monitor, told = watch(scope, model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(4), cache)
    assert told == [(0, "Caches output", "origin")]
    assert "batch" not in str([f.causes for f in monitor.findings])


@SCOPES
def test_a_cache_that_is_bad_in_what_is_read_is_no_bad_batch(scope):
    class Caches(nn.Module):
        def forward(self, x, cache, position):
            cache[position] = x
            return cache[: position + 1].sum(0)

    model, cache = Caches(), torch.zeros(8, 4)
    monitor, told = watch(scope, model)
    with torch.no_grad():
        model(torch.ones(4), cache, 0)
        cache[0, 1] = NAN
        model(torch.ones(4), cache, 1)
    assert told == [(1, "Caches input[1]", "propagated")]
    finding = next(f for f in monitor.findings if f.is_fault)
    assert (
        finding.how == "the caller gave it non-finite values, in memory that the model writes into"
    )
    assert finding.causes == ()


@SCOPES
def test_the_layer_that_reads_a_bad_cache_is_named(scope):
    """A backbone whose caller hands in the caches of all its layers."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, cache, position):
            cache[position] = self.q(x).mean(0)
            return self.o(x + cache[: position + 1].sum(0))

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, caches, position):
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, position)
            return x

    model, caches = Backbone(), [torch.zeros(8, 4) for _ in range(3)]
    monitor, told = watch(scope, model)
    with torch.no_grad():
        for position in range(4):
            if position == 2:
                caches[1][0] = NAN
            model(batch(), caches, position)
    assert told == [(2, "Backbone input[1][1]", "propagated")]
    finding = next(f for f in monitor.findings if f.is_fault)
    assert finding.how.endswith("inside of it they first show in layers.1.o input[0]")


@SCOPES
def test_room_in_a_cache_is_silent(scope):
    class Caches(nn.Module):
        def forward(self, x, cache, position):
            cache[position] = x
            return cache[: position + 1].sum(0)

    model, cache = Caches(), torch.full((8, 4), NAN)
    monitor, _ = watch(scope, model)
    with torch.no_grad():
        for position in range(3):
            model(torch.ones(4), cache, position)
    assert monitor.findings == []


# -- minus infinity --------------------------------------------------------------------------------


@SCOPES
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_of_functional_code_is_blamed_where_it_appears(scope, sign):
    class Gap(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = self.enc(x).clone()
            h[1, 0] = sign * (h[1, 0] * 0 + 100).exp()
            return self.dec(h)

    _, told = watch(scope, model := Gap())
    infer(model, torch.randn(4, 3))
    assert told == [(0, "dec input[0]", "origin")]


class Bans(nn.Module):
    def forward(self, logits):
        logits = logits.clone()
        logits[:, :2] = -INF
        return logits


@SCOPES
def test_banned_logits_are_silent_until_they_reach_a_loss(scope):
    model = nn.Sequential(nn.Linear(4, 5), Bans())
    monitor, told = watch(scope, model)
    infer(model, batch())
    assert monitor.findings == []
    labels = torch.zeros(3, dtype=torch.long)
    train(model, sgd(model), [batch()], lambda out: nn.functional.cross_entropy(out, labels))
    # Banning was harmless so far, so the loss made it: of labels that are banned.
    assert told[0][1:] == ("loss", "origin")


@SCOPES
def test_a_mask_that_a_module_returns_is_silent(scope):
    class Mask(nn.Module):
        def forward(self, n):
            return torch.full((n, n), -INF).triu(1)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.fc = Mask(), nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return (h @ h.mT + self.mask(x.shape[1])).softmax(-1) @ h

    model = Attends()
    monitor, _ = watch(scope, model)
    train(model, sgd(model), [torch.randn(2, 5, 4) for _ in range(2)])
    assert monitor.findings == []
    assert monitor.healthy


@SCOPES
def test_a_mask_that_is_known_is_not_judged_again(scope, monkeypatch):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, mask):
            return (self.fc(x) @ x.mT + mask).softmax(-1) @ x

    judged = []
    judge = _monitor.Judge.judge
    monkeypatch.setattr(
        _monitor.Judge, "judge", lambda self, r: judged.append(r.step) or judge(self, r)
    )
    model, mask = Masked(), torch.full((3, 3), -INF).triu(1)
    _, told = watch(scope, model)
    optimizer = sgd(model)

    def step(mask):
        optimizer.zero_grad()
        model(batch(), mask).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        step(mask)
    assert judged == [0]
    assert told == []
    step(mask.masked_fill(mask == 0, 1.0))  # another one
    assert judged == [0, 5]
    step(torch.full((3, 3), -INF))  # leaves nothing
    assert judged == [0, 5, 6]
    assert told[0] == (6, "Masked output", "origin")


# -- buffers ---------------------------------------------------------------------------------------


@SCOPES
def test_the_start_of_a_running_extreme_is_silent(scope):
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("least", torch.full((4,), INF))
    model.register_buffer("most", torch.full((4,), -INF))
    monitor, _ = watch(scope, model)
    train(model, sgd(model), [batch(), batch(1)])
    assert monitor.findings == []
    assert monitor.healthy


@SCOPES
def test_a_bad_buffer_is_named_where_a_layer_reads_it(scope):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(nn.Linear(4, 4), Scales())
    model[1].scale[2] = NAN
    monitor, told = watch(scope, model)
    infer(model, batch(), batch(1))
    assert told == [(0, "1.scale buffer", "origin")]
    first = monitor.findings[0]
    assert first.stats.first_nonfinite == (2,)
    assert first.causes[0].title == "the buffer was never filled, or loaded from a bad checkpoint"
    assert first.unlikely == ()
    assert monitor.findings[1].given[0] == (first.site, first.stats)


@SCOPES
def test_running_statistics_that_a_skipped_step_spoils(scope):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    monitor, told = watch(scope, model)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        x = batch(step)
        if step == 1:
            x[0, 0] = INF
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert monitor.healthy is (step == 0)
    assert told[:2] == [
        (1, "Sequential input[0]", "propagated"),
        (1, "0.running_mean buffer", "propagated"),
    ]
    model.eval()
    infer(model, batch(9))
    assert told[2:] == [(4, "0 output", "propagated")]
    given = [str(site) for site, _ in monitor.findings[-2].given]
    assert "0.running_mean buffer" in given
    assert model[1].weight.isfinite().all()


# -- told every time -------------------------------------------------------------------------------


def test_findings_and_health_of_the_unfinished_step():
    model = Net()
    monitor = nanscan.enable(model, action="log")
    optimizer = sgd(model)
    train(model, optimizer, [batch()])
    model.fc2.bias.data[0] = NAN
    model(batch(1))  # the step goes on
    assert [str(f.site) for f in monitor.findings] == ["fc2.bias param", "fc2 output"]
    assert monitor.healthy is False
    optimizer.step()
    assert [str(f.site) for f in monitor.poll()][:2] == ["fc2.bias param", "fc2 output"]


def test_a_silenced_warning_is_logged(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.ERROR, "nanscan"):
        warnings.simplefilter("ignore")
        nanscan.enable(model := Net())
        infer(model, set_nan(batch()))
    assert "Net input[0] is non-finite" in caplog.text


def test_a_second_run_in_one_process_is_warned_of():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with nanscan.watch(model := Net()):
                infer(model, set_nan(batch()))
    assert len([w for w in caught if w.category is nanscan.NonFiniteWarning]) == 2


def test_a_warning_points_at_user_code_not_at_a_trainer():
    file = f"{sysconfig.get_path('purelib')}/trainer.py"
    scope = {"__name__": "trainer"}
    exec(compile("def fit(model, x):\n    return model(x)\n", file, "exec"), scope)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        nanscan.enable(model := Net())
        scope["fit"](model, set_nan(batch()))
    assert [w.filename for w in caught if w.category is nanscan.NonFiniteWarning] == [__file__]


@pytest.mark.parametrize("site", ["Net input[0]", "fc1 output"])
def test_the_printed_name_of_a_site_is_taken_everywhere(site):
    monitor = nanscan.enable(model := Net(), action="log", ignore=site)
    infer(model, set_nan(batch()))
    assert site not in [str(f.site) for f in monitor.findings]
    assert len(monitor.findings) == 3
    assert monitor.history(site)["step"].tolist() == [0]
