"""The option `save`: a bad step is saved, and does the same again in another process."""

import gc
import json
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
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
    verdicts,
)

# -- steps that are saved --------------------------------------------------------------------------
from helpers.optimizers import Learner, bits
from nanscan import NonFiniteError, Site
from nanscan._collect import inputs
from nanscan._collect.snapshot import Snapshot
from nanscan._output import save

EXAMPLE = """
    import random
    import numpy as np
    import torch
    from torch import nn

    class Model(nn.Module):
        '''NaN where the second of two masks drops all that the first kept.'''

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.drop = nn.Dropout(0.6)
            self.last = nn.Linear(6, 1)
            self.drawn = []

        def forward(self, x, *, scale):
            self.drawn.append([torch.rand(()).item(), random.random(), float(np.random.rand())])
            x = self.drop(self.fc(x * scale["factor"])).relu()
            return self.last(x / self.drop(x).sum())

    def data(step):
        return torch.randn(1, 6, generator=torch.Generator().manual_seed(step))
"""


def train_example(model, optimizer, monitor, data):
    for step in range(200):
        optimizer.zero_grad()
        model(data(step), scale={"factor": 1.5}).sum().backward()
        optimizer.step()
        if monitor.findings:
            return
    pytest.fail("nothing went bad")


@pytest.mark.parametrize(("scope", "skip_step"), [("model", True), ("global", False)])
def test_a_saved_step_does_the_same_in_another_process(scope, skip_step, tmp_path):
    names: dict = {"__name__": "example"}
    exec(textwrap.dedent(EXAMPLE), names)  # so that both processes have the same class
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - what the model draws from
    model = names["Model"]()
    monitor = enable(scope, model, action="log", skip_step=skip_step, save_dir=tmp_path / "bad")
    train_example(model, sgd(model), monitor, names["data"])
    finding = monitor.findings[0]
    (folder,) = (tmp_path / "bad").iterdir()
    assert folder.name == f"step-{finding.step}-rank-0"
    script = textwrap.dedent(EXAMPLE) + textwrap.dedent("""
        import json, sys
        import nanscan

        saved = nanscan.load_saved(sys.argv[1])
        model = Model()
        model.load_state_dict(saved.state_dict)
        saved.restore_rng()
        with nanscan.watch(model, action="log") as monitor:
            model(*saved.args, **saved.kwargs)
        again = monitor.findings[0]
        print(json.dumps([str(again.site), again.verdict, again.how, again.stats.to_dict()]))
        print(json.dumps(model.drawn))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    again, drawn = (json.loads(line) for line in done.stdout.splitlines())
    stats = json.loads(json.dumps(finding.stats.to_dict()))
    assert again == [str(finding.site), finding.verdict, finding.how, stats]
    assert drawn == model.drawn[-1:]


def only_saved(folder):
    (path,) = folder.iterdir()
    return nanscan.load_saved(path)


def save_one(tmp_path, model, *args, mode=torch.no_grad, **kwargs):
    """Runs a model once without an optimizer; what was saved of that."""
    with nanscan.watch(model, action="log", save_dir=tmp_path), mode():
        model(*args, **kwargs)
    return only_saved(tmp_path)


class Pair(NamedTuple):
    a: object
    b: object


def test_what_is_saved_tells_all(tmp_path):
    model = Net().eval()
    model.act.train()
    saved = save_one(tmp_path, model, set_nan(batch()))
    assert bits(saved.args[0]) == bits(set_nan(batch()))
    assert (saved.step, saved.rank, saved.site) == (0, 0, Site("Net", "input", "[0]"))
    assert saved.verdict == "propagated"
    assert "Net input[0] is non-finite in step 0" in saved.text
    assert saved.kwargs == {}
    assert saved.notes == {}
    assert saved.autocast == {}
    assert saved.training == {"": False, "fc1": False, "act": True, "fc2": False}
    assert saved.versions == {"nanscan": nanscan.__version__, "torch": str(torch.__version__)}
    assert bits(saved.state_dict) == bits(dict(model.state_dict()))
    (folder,) = tmp_path.iterdir()
    assert saved.text in (folder / "finding.txt").read_text()


@SCOPES
def test_containers_are_as_they_were_when_the_call_began(scope, tmp_path):
    def forward(x, nested, *, options, pair):
        nested[1]["a"] = nested[1].pop("b")
        options.clear()
        return x * NAN

    model = Do(forward)
    options = {"n": 3, "name": "x", "t": batch(2), 5: (True, None, 1.5, b"x", torch.float16)}
    nested = [batch(1), OrderedDict(b=batch(3))]
    monitor = enable(scope, model, action="log", save_dir=tmp_path)
    model(batch(0), nested, options=options, pair=Pair(batch(4), 2))
    assert options == {}
    assert len(monitor.findings) == 1
    saved = only_saved(tmp_path)
    assert bits(saved.args) == bits((batch(0), [batch(1), {"b": batch(3)}]))
    assert type(saved.args[1][1]) is OrderedDict
    expected = {"n": 3, "name": "x", "t": batch(2), 5: (True, None, 1.5, b"x", torch.float16)}
    assert bits(saved.kwargs) == bits({"options": expected, "pair": (batch(4), 2)})
    assert saved.notes == {"kwargs['pair']": "a test_save.Pair, kept as a tuple"}


def test_what_cannot_be_loaded_is_left_out_and_listed(tmp_path):
    class Own:
        pass

    class Sub(torch.Tensor):
        pass

    deep: list = []
    for _ in range(40):
        deep = [deep]
    saved = save_one(
        tmp_path,
        Do(lambda x, *rest, **_: x * NAN),
        batch(),
        [1, Own(), {"f": len, Own: 1}],
        np.ones(3),
        batch().as_subclass(Sub),
        deep,
        key=range(3),
    )
    assert bits(saved.args[0]) == bits(batch())
    assert saved.args[1] == [1, None, None]
    assert saved.args[2:4] == (None, None)
    assert saved.kwargs == {"key": None}
    here = "test_save.test_what_cannot_be_loaded_is_left_out_and_listed.<locals>"
    assert saved.notes.pop("args[4]" + "[0]" * 15) == "a list: left out"
    assert saved.notes == {
        "args[1][1]": f"a {here}.Own: left out",
        "args[1][2]": "a dict: left out",
        "args[2]": "a numpy.ndarray: left out",
        "args[3]": f"a {here}.Sub: left out",
        "kwargs['key']": "a range: left out",
    }


@pytest.mark.parametrize("has_room", [True, False])
def test_an_input_changed_in_place_is_not_taken_for_what_it_was(has_room, tmp_path, monkeypatch):
    """It is copied before the first call already, as far as there is room."""

    def forward(x, y, z):
        y.mul_(2)
        z[0].add_(1)
        return x * NAN

    if not has_room:
        monkeypatch.setattr(inputs, "_MAX_COPIED", 0)
    x, y, z = batch(0), batch(1), batch(2)
    saved = save_one(tmp_path, Do(forward), x, y, z)
    assert bits(saved.args[0]) == bits(x)
    if has_room:
        assert bits(saved.args[1:]) == bits((batch(1), batch(2)))
        assert saved.notes == {}
    else:
        assert saved.args[1:] == (None, None)
        changed = "changed in place since the call began: left out"
        assert saved.notes == {"args[1]": changed, "args[2]": changed}


def test_an_input_that_is_new_in_a_later_call_is_copied_before_it_changes(tmp_path):
    model = Do(lambda x, cache=None: x * 1 if cache is None else cache.div_(0).sum() * x)
    nanscan.enable(model, action="log", save_dir=tmp_path)
    with torch.no_grad():
        model(batch())
        model(batch(), batch(1))
    assert bits(only_saved(tmp_path).args) == bits((batch(), batch(1)))


class Holds(nn.Module):
    """Keeps what it has seen in plain attributes."""

    def __init__(self):
        super().__init__()
        self.kept = {"all": [torch.zeros(8, 4)], "used": 0}
        self.last = torch.zeros(4)

    def forward(self, x):
        used = self.kept["used"]
        self.kept["all"][0][used] = x.mean(0)
        self.kept["used"] += 1
        self.last = x[0] + self.last
        return torch.log(self.kept["all"][0][: used + 1].abs() - used / 2) + self.last


@SCOPES
def test_a_step_that_changes_attributes_runs_again(scope, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Holds())
    monitor = enable(scope, model, action="log", save_dir=tmp_path)
    before = []
    with torch.no_grad():
        for _ in range(4):
            before.append((model[1].kept["all"][0].clone(), model[1].last))
            if not model(batch()).isfinite().all():
                break
    step = len(before) - 1
    (folder,) = tmp_path.iterdir()
    saved = nanscan.load_saved(folder)
    assert monitor.findings[0].step == saved.step == step > 0
    expected = {"kept": {"all": [before[step][0]], "used": step}, "last": before[step][1]}
    assert bits(saved.attributes) == bits({"1": expected})
    monitor.close()
    again = nn.Sequential(nn.Linear(4, 4), Holds())
    location = nanscan.replay(folder, again)
    assert (location.op, location.verdict) == ("aten.log.default", "origin")
    assert again[1].kept["used"] == step + 1


def test_an_attribute_that_cannot_be_saved_is_told(tmp_path, caplog):
    class Cache:
        def __init__(self):
            self.keys = torch.zeros(3, 4)

    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0))
    model[1].cache = Cache()
    saved = save_one(tmp_path, model, batch())
    assert saved.attributes == {"1": {"cache": None}}
    assert saved.missing == ["1.cache"]
    cache = model[1].cache
    (folder,) = tmp_path.iterdir()
    assert nanscan.replay(folder, model) is not None
    assert model[1].cache is cache
    assert "1.cache is a test_save" in caplog.text


class Cached(nn.Module):
    """Writes to a KV cache, in its arguments and in a buffer, and reads what lies before."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("used", torch.zeros(1), persistent=False)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x, caches):
        position = int(self.used)
        self.used += 1
        key = self.fc(x)
        self.total += key.sum(0)
        caches[0][position] = key.mean(0)
        return torch.log(caches[0][: position + 1].abs() - position / 2) + self.total


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_step_that_changes_a_cache_runs_again(is_nested, tmp_path):
    torch.manual_seed(0)
    model = Cached() if is_nested else Do(lambda x, cache: cache.mul_(2) * x)
    cache = torch.zeros(8, 4) if is_nested else torch.full((3, 4), 5e37)
    before = []
    with nanscan.watch(model, save_dir=tmp_path, action="log"), torch.no_grad():
        for _ in range(3):
            before.append(cache.clone())
            if not model(batch(), [cache] if is_nested else cache).isfinite().all():
                break
    step = len(before) - 1
    (folder,) = tmp_path.iterdir()
    saved = nanscan.load_saved(folder)
    assert saved.step == step > 0
    argument = saved.args[1][0] if is_nested else saved.args[1]
    assert bits(argument) == bits(before[step])
    assert saved.missing == []
    again = Cached() if is_nested else model
    location = nanscan.replay(folder, again)
    assert location.verdict == "origin"
    if is_nested:
        assert (location.op, int(again.used)) == ("aten.log.default", step + 1)


def test_a_replay_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_MAX_COPIED", 0)
    model = Do(lambda x, y: y.mul_(2) * x * NAN)
    save_one(tmp_path, model, batch(), batch(1))
    (folder,) = tmp_path.iterdir()
    with pytest.raises(RuntimeError, match=r"without args\[1\]: changed in place"):
        nanscan.replay(folder, model)


@pytest.mark.parametrize("has_room", [True, False])
def test_inference_tensors_have_no_version(has_room, tmp_path, monkeypatch):
    """So they are copied before each call."""
    if not has_room:
        monkeypatch.setattr(inputs, "_MAX_COPIED", 0)
    with torch.inference_mode():
        x = batch()
        model = Do(lambda x, n: x.add_(1) / n)
        nanscan.enable(model, action="log", save_dir=tmp_path)
        for n in (1, 1, 0):
            model(x, n)
    saved = only_saved(tmp_path)
    assert bits(saved.args[0]) == bits(batch() + 1 + 1 if has_room else batch() + 1 + 1 + 1)
    assert has_room or "inference tensor" in saved.notes["args[0]"]
    assert bool(saved.notes) is not has_room


def test_views_bring_no_storage_along_and_parameters_keep_their_ties(tmp_path):
    model = Net(8)
    model.fc2.weight = model.fc1.weight
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    big = torch.randn(100_000, 8)
    x = big[3:5].requires_grad_()
    x.data[0, 0] = NAN
    saved = save_one(tmp_path, model, x)
    (folder,) = tmp_path.iterdir()
    assert (folder / "call.pt").stat().st_size < 100_000
    assert saved.args[0].requires_grad
    assert list(saved.state_dict) == list(model.state_dict())
    model.load_state_dict(saved.state_dict)
    weights = [saved.state_dict[f"fc{i}.weight"] for i in (1, 2)]
    assert weights[0].data_ptr() == weights[1].data_ptr()


def test_a_large_state_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_MAX_STATE_BYTES", 100)
    saved = save_one(tmp_path, Net(), set_nan(batch()))
    assert saved.state_dict is None
    assert saved.notes == {"state_dict": "of 160 bytes: left out"}


def test_autocast_is_told(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        saved = save_one(tmp_path, Net(), set_nan(batch()))
    assert saved.autocast == {"cpu": torch.bfloat16}


@pytest.mark.parametrize("bad", [0, 2, 4])
@SCOPES
def test_a_bad_microbatch_is_the_one_that_is_saved(scope, bad, tmp_path):
    model = Net()
    optimizer = sgd(model)
    told = []
    monitor = enable(scope, model, action=told.append, save_dir=tmp_path, skip_step=True)
    train(model, optimizer, [batch()])
    for i in range(5):
        out = model(batch(i))
        assert bool(told) == (i > bad)  # as soon as without `save`
        (out.sum() * (NAN if i == bad else 1)).backward()
    optimizer.step()
    assert [(f.step, f.site.kind) for f in told] == [(1, "loss")]
    assert monitor.findings[0] is told[0]
    assert bits(only_saved(tmp_path).args) == bits((batch(bad),))


@SCOPES
def test_parameters_are_saved_as_they_were_before_the_step(scope, tmp_path):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, action="log", save_dir=tmp_path)
    before = bits(dict(model.state_dict()))
    train(model, sgd(model), [batch()])
    assert not torch.isfinite(model.fc1.weight).all()
    saved = only_saved(tmp_path)
    assert bits(saved.state_dict) == before
    assert saved.notes == {}
    # The findings that users get are the same as without `save`.
    affected = [str(site) for site in monitor.findings[0].affected]
    assert "fc1.weight param" in affected
    monitor.close()
    torch.manual_seed(0)
    other = Gap(lambda x: x / 0)
    plain = enable(scope, other, action="log")
    train(other, sgd(other), [batch()])
    assert [str(site) for site in plain.findings[0].affected] == affected
    assert verdicts(plain) == verdicts(monitor)


def test_what_is_absorbed_is_told_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Do(torch.nan_to_num), nn.Linear(4, 4))
    told = []
    nanscan.enable(model, action=told.append, save_dir=tmp_path)
    train(model, sgd(model), [set_nan(batch())])
    assert [f.verdict for f in told] == ["propagated", "absorbed"]


def test_what_an_optimizer_made_is_saved_after_its_step(tmp_path):
    model = Net()
    monitor = nanscan.enable(model, action="log", save_dir=tmp_path)
    train(model, sgd(model, lr=INF), [batch()])
    assert monitor.findings[0].site.kind == "param"
    saved = only_saved(tmp_path)
    assert saved.notes["state_dict"].startswith("as it was after the optimizer's step")
    assert bits(saved.args) == bits((batch(),))


def test_actions_come_when_they_would_without_save(tmp_path):
    events = []
    model = Net()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: events.append("stepped"))
    action = lambda finding: events.append(f"{finding.site} {len(list(tmp_path.iterdir()))}")
    monitor = nanscan.enable(model, action=action, save_dir=tmp_path)
    train(model, optimizer, [batch(), set_nan(batch())])
    assert events == ["stepped", "stepped", "Net input[0] 1"]
    monitor.close()
    model = Gap(lambda x: x / 0)
    monitor = nanscan.enable(model, action="raise", save_dir=tmp_path)
    before = bits(model.state_dict())
    with pytest.raises(NonFiniteError):
        train(model, sgd(model), [batch()])
    assert bits(model.state_dict()) != before
    assert monitor.steps == 1


@SCOPES
def test_a_step_that_is_judged_late_has_its_own_inputs(scope, tmp_path, monkeypatch):
    """As on CUDA, where a step is judged when its rows arrived."""
    model = Net()
    monitor = enable(scope, model, action="log", save_dir=tmp_path, skip_step=True)
    monkeypatch.setattr(Snapshot, "ready", lambda self: False)
    monkeypatch.setattr(monitor._collector, "_judge_gradients", lambda: None)
    optimizer = sgd(model)
    train(model, optimizer, [batch(0), set_nan(batch(1)), batch(2), batch(3)])
    assert not list(tmp_path.iterdir())
    monitor.flush()
    saved = only_saved(tmp_path)
    assert (saved.step, bits(saved.args)) == (1, bits((set_nan(batch(1)),)))
    assert "after the optimizer's step" in saved.notes["state_dict"]


@pytest.mark.parametrize("late", [False, True])
def test_inputs_are_let_go_when_their_step_is_judged(late, tmp_path, monkeypatch):
    model = Net()
    monitor = nanscan.enable(model, save_dir=tmp_path)
    optimizer = sgd(model)
    if late:
        monkeypatch.setattr(Snapshot, "ready", lambda self: False)
    x = batch()
    alive = weakref.ref(x)
    model(x).sum().backward()
    del x
    assert alive() is not None
    optimizer.step()
    if late:
        assert alive() is not None
        monitor.flush()
    assert alive() is None


def test_inputs_of_validation_are_let_go_with_its_judgement(tmp_path):
    model = Net()
    nanscan.enable(model, save_dir=tmp_path)
    train(model, sgd(model), [batch()])
    x = batch()
    alive = weakref.ref(x)
    infer(model, x)
    del x
    assert alive() is None


def test_inputs_are_not_kept_without_save():
    model = Net()
    nanscan.enable(model)
    x = batch()
    alive = weakref.ref(x)
    with torch.no_grad():
        model.fc1(x)
    del x
    assert alive() is None


@SCOPES
def test_the_model_that_went_bad_is_the_one_that_is_saved(scope, tmp_path):
    both = nn.ModuleDict({"a": Net(), "b": Net()})
    if scope == "global":
        both = {"a": Net(), "b": Net()}
    enable(scope, both, action="log", save_dir=tmp_path, skip_step=True)
    parameters = [p for key in "ab" for p in both[key].parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    x, y = batch(1), batch(2)
    loss = both["b"](set_nan(x)).sum() + both["a"](y).sum()
    loss.backward()
    optimizer.step()
    saved = only_saved(tmp_path)
    assert bits(saved.args) == bits((set_nan(x),))
    assert bits(saved.state_dict) == bits(dict(both["b"].state_dict()))


@SCOPES
def test_a_recomputation_is_not_taken_for_a_call(scope, tmp_path):
    inner = Net()
    model = Do(lambda x: checkpoint(inner, x.tanh(), use_reentrant=False) * 1)
    model.inner = inner
    enable(scope, model, action="log", save_dir=tmp_path)
    optimizer = sgd(model)
    model(batch()).sum().backward()
    inner.fc1.bias.grad[0] = NAN
    optimizer.step()
    assert bits(only_saved(tmp_path).args) == bits((batch(),))


def test_validation_does_not_replace_the_call_that_trains(tmp_path):
    model = Net()
    enable("model", model, action="log", save_dir=tmp_path)
    optimizer = sgd(model)
    train(model, optimizer, [batch(0)])
    infer(model, batch(1))
    train(model, optimizer, [set_nan(batch(2))])
    assert bits(only_saved(tmp_path).args) == bits((set_nan(batch(2)),))


def test_three_steps_of_a_run_are_saved(tmp_path):
    model = Net()
    monitor = nanscan.enable(model, action="log", save_dir=tmp_path, skip_step=True)
    optimizer = sgd(model)
    for i in range(5):
        calm = [batch(i)] * 101  # so that each is a fault of its own
        train(model, optimizer, [set_nan(batch(i)), set_nan(batch(i)), *calm])
    assert len([f for f in monitor.findings if f.verdict == "recovered"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step}-rank-0" for step in (0, 103, 206)
    ]
    model(batch())
    assert monitor._inputs.calls == ()  # nothing is kept that would never be written


def test_what_an_earlier_run_saved_stays(tmp_path):
    for x in (set_nan(batch(0)), set_nan(batch(1))):
        with nanscan.watch(Net(), action="log", save_dir=str(tmp_path)) as monitor, torch.no_grad():
            monitor._model()(x)
    names = ["step-0-rank-0", "step-0-rank-0-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for seed, name in enumerate(names):
        assert bits(nanscan.load_saved(tmp_path / name).args) == bits((set_nan(batch(seed)),))


def test_a_scale_search_is_not_saved(tmp_path):
    learner = Learner("SGD", {})
    monitor = nanscan.enable(learner.model, action="log", save_dir=tmp_path, skip_step=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    learner.set_gradients(0, INF)
    scaler.step(learner.optimizer)
    assert [f.verdict for f in monitor.findings] == ["scale-search"]
    assert not list(tmp_path.iterdir())


def warnings_logged(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    model = Net()
    monitor = nanscan.enable(model, action="log", save_dir=tmp_path / "file", skip_step=True)
    optimizer = sgd(model)
    for i in range(3):
        train(model, optimizer, [set_nan(batch(i)), batch(i)])
    (message,) = warnings_logged(caplog)
    assert message.startswith("nanscan: could not save step 0: ")
    assert monitor.healthy
    assert len(monitor.findings) == 6 * 2 + 3 or len(monitor.findings) > 3


def test_where_it_was_saved_is_logged(tmp_path, caplog):
    save_one(tmp_path, Net(), set_nan(batch()))
    assert warnings_logged(caplog) == [f"nanscan: saved step 0 to {tmp_path / 'step-0-rank-0'}"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    script = """
        import resource, sys, warnings, torch, nanscan
        from torch import nn
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = nanscan.enable(model, action="log", save_dir=sys.argv[1], skip_step=True)
        for i in range(6):
            optimizer.zero_grad()
            (model(torch.randn(4, 200)).sum() * (float("nan") if i % 2 else 1)).backward()
            optimizer.step()
        assert monitor.steps == 6
        assert all(torch.isfinite(p).all() for p in model.parameters())
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "done\n"
    assert done.stderr.count("could not save step") == 1
    assert "could not save step 1: OSError: [Errno 27] File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_writing_leaves_nothing_half_written(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    model = Net()
    nanscan.enable(model, action="log", save_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        infer(model, set_nan(batch()))
    assert not list(tmp_path.iterdir())


def test_containers_that_cannot_be_read_break_nothing(tmp_path, caplog):
    class Broken(dict):
        def items(self):
            raise RuntimeError("no")

    model = Do(lambda x, extra: x * NAN)
    with nanscan.watch(model, action="log", save_dir=tmp_path, kinds="output"), torch.no_grad():
        for _ in range(2):
            model(batch(), Broken(a=1))
    saved = only_saved(tmp_path)
    assert saved.args == ()
    assert saved.notes == {"": "the call in which it was found is not known"}
    with pytest.raises(ValueError, match="no states of random number generators"):
        saved.restore_rng()
    assert [m for m in warnings_logged(caplog) if "could not" in m] == [
        "nanscan: could not keep the inputs of a step: RuntimeError: no"
    ]


def test_calls_in_threads_are_each_thread_s_own(tmp_path):
    models = [Net() for _ in range(4)]
    nanscan.enable(action="log", save_dir=tmp_path)
    go = threading.Barrier(4)

    def work(i):
        go.wait()
        for step in range(20):
            infer(models[i], set_nan(batch(i)) if step == 10 and i == 2 else batch(i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A forward that ends a step cuts those of other threads in two, each with a finding perhaps.
    saved = [nanscan.load_saved(path) for path in tmp_path.iterdir()]
    assert saved
    for one in saved:
        assert one.notes or bits(one.args) == bits((set_nan(batch(2)),))


def test_a_model_that_is_watched_and_saved_can_go(tmp_path):
    model = Net()
    alive = weakref.ref(model)
    nanscan.enable(model, save_dir=tmp_path, skip_step=True)
    train(model, sgd(model), [batch()])
    del model
    gc.collect()
    assert alive() is None


def test_bad_arguments_are_told():
    with pytest.raises(TypeError, match="save_dir must be the path"):
        nanscan.enable(Net(), save_dir=True)


def test_there_must_be_something_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved step"):
        nanscan.load_saved(tmp_path)
