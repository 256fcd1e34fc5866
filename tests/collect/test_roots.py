"""Every module of the process is watched: which one is the model, as the optimizer tells."""

import copy
import gc

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import NAN, Do, Net, batch, calls, infer, set_nan, sgd, train, verdicts
from nanscan import Site
from nanscan._collect import roots


class Autoencoder(nn.Module):
    """Never runs: functions call its parts."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Gen(Net):
    pass


class Disc(Net):
    pass


def make_tanh(x):
    return nn.Tanh()(x)


def names(monitor):
    return {str(site).split()[0] for site in monitor.coverage().sites} - {"loss"}


def parameters(model, prefix=""):
    return {prefix + name for name, _ in model.named_parameters()}


def reconstruct(model, optimizer, x):
    optimizer.zero_grad()
    model.decoder(model.encoder(x)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def monitor():
    return nanscan.enable(action="log")


@pytest.mark.parametrize("when", ["before enable", "before the step", "after the first forward"])
def test_the_module_that_holds_the_parameters_is_the_model(when):
    model = Autoencoder()
    optimizer = sgd(model) if when == "before enable" else None
    monitor = nanscan.enable(action="log")
    if when == "after the first forward":
        infer(model.encoder, batch())
    optimizer = optimizer or sgd(model)
    for _ in range(3):
        reconstruct(model, optimizer, batch())
    assert names(monitor) == parameters(model) | {
        *("encoder", "encoder.0", "encoder.1", "decoder.0", "decoder.1")
    }
    assert monitor.coverage().not_called == ("Autoencoder",)
    steps = monitor.history("encoder.0.weight grad")["step"]
    assert steps.tolist() == [0, 1, 2]  # also where inference came before: the training counts
    reconstruct(model, optimizer, set_nan(batch()))
    assert str(monitor.findings[0].site) == "encoder input[0]"


def test_the_first_finding_has_the_full_name(monitor):
    model = Autoencoder()
    reconstruct(model, sgd(model), set_nan(batch()))
    first = monitor.findings[0]
    assert (first.step, str(first.site), first.verdict) == (0, "encoder input[0]", "propagated")
    assert {f.site.name for f in monitor.findings} <= {
        *parameters(model),
        *(f"{part}{number}" for part in ("encoder", "decoder") for number in ("", ".0", ".1")),
        "loss",
    }


def test_two_models_go_by_their_classes(monitor):
    gen, disc = Gen(), Disc()
    ours, theirs = sgd(gen), sgd(disc)
    for _ in range(2):
        theirs.zero_grad()
        disc(gen(batch()).detach()).mean().backward()
        theirs.step()
        ours.zero_grad()
        disc(gen(batch())).mean().backward()
        ours.step()
    assert parameters(gen, "Gen.") | parameters(disc, "Disc.") <= names(monitor)
    assert all(name.startswith(("Gen", "Disc")) for name in names(monitor))
    disc.fc1.weight.register_hook(lambda gradient: gradient * NAN)
    theirs.zero_grad()
    disc(gen(batch()).detach()).mean().backward()
    theirs.step()
    assert str(monitor.findings[0].site) == "Disc.fc1.weight grad"


def test_two_models_of_one_class_are_told_apart(monitor):
    first, second = Net(), Net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    train(lambda x: second(first(x)), optimizer, [batch()])
    assert parameters(first, "Net.") | parameters(second, "Net#2.") <= names(monitor)


def test_one_trained_model_beside_others_keeps_its_names(monitor):
    model, teacher = Net(), Gen()
    optimizer = sgd(model)
    criterion = nn.MSELoss()
    for _ in range(2):
        with torch.no_grad():
            wanted = teacher(batch())
        if _ == 0:
            infer(model, batch())
        criterion(model(batch()), wanted).backward()
        optimizer.step()
    assert {site for site in calls(monitor) if site.endswith("weight grad")} == {
        *("Net.fc1.weight grad", "Net.fc2.weight grad")
    }
    assert "Gen output" not in names(monitor)


def test_a_distillation_module_that_holds_both(monitor):
    class Distill(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = Net(), Net()

    both = Distill()
    optimizer = sgd(both.student)
    for _ in range(2):
        with torch.no_grad():
            wanted = both.teacher(batch())
        (both.student(batch()) - wanted).square().mean().backward()
        optimizer.step()
    assert parameters(both.student, "student.") <= names(monitor)
    assert {"teacher.fc1", "student.fc1"} <= names(monitor)


def test_the_average_beside_a_model_is_no_part_of_it(monitor):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, optimizer, [batch()])
        average.update_parameters(model)
        infer(average, batch())
    assert parameters(model) <= names(monitor)


def test_adapters_alone_are_trained(monitor):
    model = Autoencoder()
    model.requires_grad_(requires_grad=False)
    model.adapters = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizer = sgd(model.adapters)
    for _ in range(2):
        x = model.adapters["a"](model.encoder(batch()))
        model.adapters["b"](model.decoder(x)).sum().backward()
        optimizer.step()
    assert {"adapters.a.weight", "adapters.b", "encoder.0"} <= names(monitor)


@pytest.mark.parametrize("container", ["list", "dict"])
def test_containers_of_torch(monitor, container):
    parts = nn.Linear(4, 4), nn.Linear(4, 4)
    model = (
        nn.ModuleList(parts)
        if container == "list"
        else nn.ModuleDict({"a": parts[0], "b": parts[1]})
    )
    optimizer = sgd(model)
    for _ in range(2):
        parts[1](parts[0](batch())).sum().backward()
        optimizer.step()
    assert parameters(model) <= names(monitor)
    assert not {"Linear", "weight"} & names(monitor)


def test_a_wrapper_adds_no_names(monitor):
    """As DistributedDataParallel: what it wraps was called first."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = Net()
    wrapped = Wrapper(model)
    infer(model, batch())
    train(wrapped, sgd(wrapped), [batch()])
    assert parameters(model) <= names(monitor)


def test_a_part_that_ran_before_its_model(monitor):
    model = Net()
    optimizer = sgd(model)
    infer(model.fc1, batch())
    train(model, optimizer, [batch(), batch()])
    assert parameters(model) <= names(monitor)
    assert {name for name in names(monitor) if name.startswith("Linear")} == set()


def test_what_is_made_in_a_forward_moves_along(monitor):
    model = Autoencoder()
    model.encoder = nn.Sequential(Do(make_tanh), nn.Linear(4, 4))
    optimizer = sgd(model)
    infer(model.encoder, batch())
    reconstruct(model, optimizer, batch())
    assert "encoder.0.<Tanh>" in names(monitor)


def test_loose_parameters_keep_their_names(monitor):
    loose = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.Adam(loose)
    for _ in range(2):
        (loose[0] * loose[1]).sum().backward()
        optimizer.step()
    sites = monitor.coverage().sites
    assert {"Adam parameter 0 grad", "Adam parameter 1 param"} <= {*sites}
    assert all(site.startswith(("Adam", "loss")) for site in sites)


def test_loose_parameters_leave_the_names_of_a_model(monitor):
    model = Net()
    loose = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    optimizer = torch.optim.SGD(loose.values(), 0.1)
    for _ in range(2):
        torch.func.functional_call(model, loose, batch()).sum().backward()
        optimizer.step()
    assert {"fc2 output", "SGD parameter 3 grad"} <= set(monitor.coverage().sites)


def test_names_of_before_stay_valid():
    """A fault was told in the first step, before the model was known."""
    monitor = nanscan.enable(action="log")
    model = Autoencoder()
    infer(model.encoder, set_nan(batch()))
    before = monitor.findings[0].site
    assert str(before) == "Sequential input[0]"
    optimizer = sgd(model)
    for _ in range(2):
        reconstruct(model, optimizer, batch())
    assert monitor.findings[0].site == before
    new = monitor.history(Site("encoder", "input", "[0]"))
    assert monitor.history(before)["step"].tolist() == new["step"].tolist()
    assert new["step"].tolist()[0] == 0
    assert monitor.history("0.weight param")["step"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["0.weight grad", "0.weight", "encoder.0.weight grad", "enc*"])
def test_old_and_new_names_are_ignored(name):
    monitor = nanscan.enable(action="log", ignore=[name, "kind:param"])
    model = Autoencoder()
    infer(model.encoder, batch())
    optimizer = sgd(model)
    model.encoder[0].weight.register_hook(lambda gradient: gradient * NAN)
    reconstruct(model, optimizer, batch())
    assert verdicts(monitor) == []


def test_a_name_that_another_module_has_now_is_that_ones():
    parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)])
    monitor = nanscan.enable(action="log", ignore="0")
    infer(parts[0], batch())
    optimizer = sgd(parts)
    parts[0][0].register_forward_hook(lambda *_: torch.full((3, 4), NAN))
    for _ in range(2):
        parts[1](parts[0](batch())).sum().backward()
        optimizer.step()
    assert str(monitor.findings[0].site) == "0.0 output"


@pytest.mark.parametrize(
    ("options", "watched"),
    [
        ({"include": "encoder"}, {"encoder"}),
        ({"exclude": "decoder"}, {"encoder"}),
        ({"include": nn.Linear}, {"encoder.0", "decoder.0"}),
    ],
)
def test_filters_take_full_names(options, watched):
    model = Autoencoder()
    optimizer = sgd(model)
    monitor = nanscan.enable(action="log", **options)
    for _ in range(2):
        reconstruct(model, optimizer, batch())
    found = names(monitor)
    assert found
    assert all(any(name.startswith(each) for each in watched) for name in found)


def test_names_do_not_change_amid_a_step(monitor):
    """A fault of the first forward was asked for; what follows in that step has names like it."""
    model = Autoencoder()
    x = model.encoder(set_nan(batch()))
    assert str(monitor.findings[0].site) == "Sequential input[0]"
    optimizer = sgd(model)
    model.decoder(x).sum().backward()
    optimizer.step()
    first = [f.site.name for f in monitor.findings if f.step == 0]
    assert not any(name.startswith(("encoder", "decoder")) for name in first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    reconstruct(model, optimizer, batch())
    reconstruct(model, optimizer, set_nan(batch()))
    assert any(f.site.name.startswith("encoder") for f in monitor.findings if f.step == 2)


def test_the_process_is_searched_a_few_times_only(monitor, monkeypatch):
    """Some code makes an optimizer of loose tensors in each step."""
    searches = []
    alive = roots.alive
    monkeypatch.setattr(roots, "alive", lambda kinds: (searches.append(1), alive(kinds))[1])
    for _ in range(64):
        loose = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([loose], 0.1)
        loose.sum().backward()
        optimizer.step()
    assert 1 <= len(searches) <= 8


def test_a_garbage_wrapper_of_the_same_parts_does_not_win(monitor):
    model = Autoencoder()
    optimizer = sgd(model)
    outer = nn.ModuleDict({"old": model})
    reconstruct(model, optimizer, batch())
    reconstruct(model, optimizer, batch())
    assert outer is not None
    assert parameters(model) <= names(monitor)


def test_no_module_is_kept_alive(monitor):
    model = Autoencoder()
    optimizer = sgd(model)
    reconstruct(model, optimizer, batch())
    copied = copy.deepcopy(model)
    del model, optimizer
    gc.collect()
    assert [m for m in gc.get_objects() if type(m) is Autoencoder] == [copied]


def test_monitors_of_a_model_and_of_all_have_their_own_names():
    model = Autoencoder()
    everything = nanscan.enable(action="log")
    one = nanscan.enable(model, action="log")
    optimizer = sgd(model)
    reconstruct(model, optimizer, batch())
    reconstruct(model, optimizer, batch())
    assert parameters(model) <= names(everything) & names(one)


def test_a_model_alone_has_the_names_of_named_parameters():
    model = nn.Linear(4, 4)
    monitor = nanscan.enable(model, action="log")
    train(model, sgd(model), [batch()])
    assert {"weight grad", "bias param"} <= set(calls(monitor))
