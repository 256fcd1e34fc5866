"""Arguments and outputs of any shape and type, and tensors that cannot be scanned as they are."""

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    NAN,
    SCOPES,
    Do,
    Net,
    batch,
    calls,
    enable,
    infer,
    train,
)

# -- arguments and outputs of any shape ------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple = ()
    note: str = "text"
    missing: torch.Tensor | None = None


class ModelOutput(collections.OrderedDict):
    """As in transformers: a dataclass and a mapping at once, with fields of None left out."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                collections.OrderedDict.__setitem__(self, field.name, value)


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past: tuple | None = None


class Tuple(tuple):
    __slots__ = ()


def one():
    return torch.ones(2)


@pytest.mark.parametrize(
    ("output", "paths"),
    [
        ((one(), (one(), one())), {"[0]", "[1][0]", "[1][1]"}),
        ({"a": one(), 3: [one()], ("k",): one()}, {".a", "[3][0]", "[('k',)]"}),
        (Pair(one(), {"x": one()}), {".left", ".right.x"}),
        (Tuple((one(), one())), {"[0]", "[1]"}),
        (Output(one(), (one(),)), {".logits", ".hidden[0]"}),
        (
            CausalOutput(logits=one(), past=((one(), one()),)),
            {".logits", ".past[0][0]", ".past[0][1]"},
        ),
        (torch.ones(2, 3).max(0), {"[0]"}),
        ([None, True, 1, 1.5, "s", b"b", 1j, object(), one()], {"[8]"}),
        ((torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)), set()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
@SCOPES
def test_containers_are_walked(scope, output, paths):
    model = Do(lambda: output)
    monitor = enable(scope, model)
    with torch.no_grad():
        assert model() is output
    assert monitor.coverage().sites == [f"Do output{path}" for path in sorted(paths)] or set(
        monitor.coverage().sites
    ) == {f"Do output{path}" for path in paths}


@SCOPES
def test_containers_come_in_as_arguments_too(scope):
    model = Do(lambda *args, **kwargs: args[0])
    monitor = enable(scope, model)
    with torch.no_grad():
        model(
            one(), None, 3, "s", [one(), {"x": one()}], mask=one(), cache=(one(), None), flag=True
        )
    assert set(monitor.coverage().sites) == {
        "Do input[0]",
        "Do input[4][0]",
        "Do input[4][1].x",
        "Do input.mask",
        "Do input.cache[0]",
    }


@SCOPES
def test_lstm_and_attention(scope):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)
            self.attend = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            x, _ = self.lstm(x)
            return self.attend(query=x, key=x, value=x, need_weights=True)

    model = Both()
    monitor = enable(scope, model)
    train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(3, 2, 4)],
        lambda o: o[0].sum(),
    )
    rows = calls(monitor)
    assert {
        "lstm output[0]",
        "lstm output[1][0]",
        "lstm output[1][1]",
        "attend output[0]",
        "attend output[1]",
        "lstm.weight_ih_l1 grad",
        "attend.in_proj_weight param",
        "attend.out_proj.weight grad",
    } <= set(rows)
    assert not any("attend input" in site for site in rows)
    assert set(rows.values()) == {1}
    assert monitor.coverage().not_called == ("attend.out_proj",)


@dataclasses.dataclass
class Branch:
    value: torch.Tensor
    parent: "Branch | None" = None
    children: list = dataclasses.field(default_factory=list)

    def grow(self, depth):
        if depth:
            self.children = [Branch(one(), self).grow(depth - 1) for _ in range(3)]
        return self


@SCOPES
def test_containers_that_contain_themselves(scope):
    ring = [one()]
    ring += [ring] * 5
    model = Do(lambda *args: args)
    monitor = enable(scope, model)
    with torch.no_grad():
        model(ring, Branch(one()).grow(3))
    sites = monitor.coverage().sites
    assert len(sites) == 1 + (1 + 3 + 9 + 27)
    assert {"Do input[0][0]", "Do input[1].value", "Do input[1].children[2].value"} < set(sites)


class Hostile(collections.abc.Mapping):
    def __getitem__(self, key):
        raise RuntimeError("not for you")

    def __iter__(self):
        raise RuntimeError("not for you")

    def __len__(self):
        return 1


@SCOPES
def test_an_argument_that_cannot_be_read_does_not_stop_the_model(scope):
    model = Do(lambda *args, **kwargs: args[1])
    monitor = enable(scope, model)
    with torch.no_grad():
        out = model(Hostile(), one(), key=Hostile())
    assert out.tolist() == [1.0, 1.0]
    assert "Do input[1]" in monitor.coverage().sites
    skipped = monitor.coverage().skipped
    assert set(skipped) == {"Do input[0]", "Do input.key"}
    assert all(why == "reading it raised RuntimeError: not for you" for why in skipped.values())


# -- tensors that cannot be scanned, or not as they are --------------------------------------------


class Scaled(torch.Tensor):
    """A subclass without a wrapper: its own memory."""


def test_subclasses_are_scanned_over_their_memory():
    model = Net()
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach().as_subclass(Scaled))
    monitor = nanscan.enable(model)
    train(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [batch()],
        lambda o: o.sum().as_subclass(torch.Tensor),
    )
    rows = calls(monitor)
    assert {"fc1.weight param", "fc1.weight grad", "fc1 output"} <= set(rows)
    assert monitor.coverage().skipped == {}


@SCOPES
def test_sparse_and_lazy_tensors(scope):
    model = Do(lambda *args: args)
    monitor = enable(scope, model)
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, NAN], (3,), check_invariants=True)
    negative = torch.tensor([1 + 1j, 1 + 2j]).conj().imag
    assert negative.is_neg()
    with pytest.warns(nanscan.NonFiniteWarning, match=r"Do input\[0\].values"), torch.no_grad():
        model(sparse, negative)
    assert monitor.findings[0].stats.nan_count == 1
    assert monitor.history(nanscan.Site("Do", "input", "[1]"))["min"].tolist() == [-2.0]


@SCOPES
def test_torch_func_transforms_run_and_are_listed_as_skipped(scope):
    model = Net()
    monitor = enable(scope, model)
    x = batch()
    params = dict(model.named_parameters())
    batched = torch.func.vmap(lambda row: torch.func.functional_call(model, params, row))(x)
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum(), has_aux=False)(
        params
    )
    nanscan.disable()
    assert torch.allclose(batched, model(x))
    model(x).sum().backward()
    assert torch.equal(grads["fc1.weight"], model.fc1.weight.grad)
    skipped = monitor.coverage().skipped
    assert skipped["fc1 output"] == "it is inside a torch.func transform, which hides its values"
    assert monitor.findings == []


@SCOPES
def test_fake_and_meta_tensors_pass_through(scope):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = Net().to("meta")
    monitor = enable(scope, model)
    assert model(torch.ones(2, 4, device="meta")).shape == (2, 4)
    skipped = monitor.coverage().skipped
    assert skipped["fc1 output"] == "it is on the meta device, which has no data"
    assert skipped["fc1.weight param"] == "it is on the meta device, which has no data"
    with FakeTensorMode():
        fake = Net()
        monitor = enable(scope, fake)
        assert fake(torch.ones(2, 4)).shape == (2, 4)
        monitor.flush()
    assert monitor.findings == []
    assert (
        "fc2 output" in monitor.coverage().skipped
        or "Net#2.fc2 output" in monitor.coverage().skipped
    )


def test_complex_and_float8_modules():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, dtype=torch.complex64)
            self.quantise = Do(lambda x: x.abs().clamp(max=4).to(torch.float8_e4m3fn))

        def forward(self, x):
            return self.quantise(self.fc(x))

    model = Both()
    monitor = nanscan.enable(model)
    infer(model, torch.ones(2, 4, dtype=torch.complex64))
    assert set(calls(monitor)) == {"Both input[0]", "fc output", "quantise output"}
    assert monitor.findings == []
