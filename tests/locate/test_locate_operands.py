"""What locate says of an op: its module, what its operands held, and where they came from."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.located import marked, where
from helpers.models import INF

# -- where: modules, and what the report says ------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        y = self.fc(x)
        z = y * 3e38  # in the block
        return self.norm(z)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), Block())
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def test_the_innermost_module():
    location = nanscan.locate(Model(), torch.full((2, 4), 10.0))
    assert where(location)[:3] == ("aten.mul.Tensor", marked(Block, "in the block"), "origin")
    assert (location.module, location.at.module_type) == ("blocks.1", "Block")
    assert location.at.function == "forward"
    assert location.code == "z = y * 3e38  # in the block"


def test_a_parameter_is_named():
    model = Model()
    with torch.no_grad():
        model.blocks[1].fc.weight.fill_(1e38)
    location = nanscan.locate(model, torch.full((2, 4), 10.0))
    assert (location.op, location.module) == ("aten.addmm.default", "blocks.1.fc")
    assert location.line == marked(Block.forward, "in the block") - 1
    names = [(o.name, o.what) for o in location.operands]
    assert ("self", "blocks.1.fc.bias") in names
    assert ("mat2", "blocks.1.fc.weight") in names


def test_nan_out_of_inf_is_a_consequence():
    def function():
        x = torch.full((3,), 100.0)
        y = x.exp()
        return y - y  # NaN

    location = nanscan.locate(function)
    assert location.op == "aten.exp.default"
    assert (location.consequence.name, location.consequence.line) == (
        "aten.sub.Tensor",
        marked(function, "NaN"),
    )


def test_what_minus_infinity_reached():
    location = nanscan.locate(lambda: torch.zeros(2).log())
    assert location.reached == "what it returned"


def test_of_a_scripted_or_unknown_line_there_is_still_an_op():
    code = compile("def made_up(x):\n    return x / 0\n", "<no such file>", "exec")
    namespace = {}
    exec(code, namespace)
    location = nanscan.locate(namespace["made_up"], torch.ones(2))
    assert (location.op, location.file, location.line) == ("aten.div.Tensor", "<no such file>", 2)
    assert location.code == ""
    assert "aten.div.Tensor" in str(location)


# -- operands --------------------------------------------------------------------------------------


def _moments(x):
    x = x.double()
    finite = x[x.isfinite()]
    return finite.mean().item(), finite.std(correction=0).item()


@pytest.mark.host_only(reason="of tensors on a device the moments are taken only if torch says so")
def test_operands_side_by_side():
    kept = {}

    def function():
        kept["self"] = torch.linspace(-3, 3, 101).view(1, 101) * 1e38
        kept["other"] = torch.rand(7, 101) * 3e38
        kept["result"] = kept["self"] + kept["other"]  # here
        return kept["result"] * 2

    location = nanscan.locate(function)
    assert where(location)[:2] == ("aten.add.Tensor", marked(function))
    assert [o.name for o in location.operands] == ["self", "other"]
    assert [o.name for o in location.at.results] == ["result"]
    for operand in (*location.operands, *location.at.results):
        x, stats = kept[operand.name], operand.stats
        assert (operand.shape, operand.dtype) == (tuple(x.shape), torch.float32)
        finite = x[x.isfinite()]
        assert (stats.numel, stats.nonfinite_count) == (x.numel(), x.numel() - finite.numel())
        assert (stats.min, stats.max) == (finite.min().item(), finite.max().item())
        assert stats.absmax == finite.abs().max().item()
        assert operand.has_moments
        mean, std = _moments(x)
        assert stats.mean == pytest.approx(mean, rel=1e-12)
        assert stats.std == pytest.approx(std, rel=1e-12)
    assert location.at.results[0].stats.posinf_count > 0


def test_what_is_known_of_operands():
    def function(batch):
        x = torch.zeros(3)  # zeros
        return batch / x

    location = nanscan.locate(function, torch.ones(3))
    told = {o.name: o.made_by for o in location.operands}
    assert told["self"] == ""
    assert (
        told["other"] == f"aten.zeros.default, test_locate_operands.py:{marked(function, 'zeros')}"
    )


def test_operands_are_as_they_were_before_an_op_in_place():
    def function():
        x = torch.full((4,), 3e38)
        return x.mul_(10)

    (x,) = nanscan.locate(function).operands
    assert (x.name, x.stats.is_finite) == ("self", True)
    assert x.stats.absmax == torch.tensor(3e38).item()


def test_operands_of_lists():
    def function():
        return torch._foreach_mul([torch.ones(2), torch.full((3,), 3e38)], 2.0)

    location = nanscan.locate(function)
    assert [(o.name, o.shape) for o in location.operands] == [("self[0]", (2,)), ("self[1]", (3,))]
    assert [o.stats.posinf_count for o in location.at.results] == [0, 3]


def test_integers_have_no_stats():
    def function():
        return torch.ones(2) / torch.zeros(2, dtype=torch.int64)

    first, second = nanscan.locate(function).operands
    assert first.stats is not None
    assert (second.stats, second.dtype) == (None, torch.int64)


def test_settings():
    x = torch.tensor([[1.0, -INF], [-INF, -INF]])
    location = nanscan.locate(lambda: x.softmax(1))
    assert location.at.settings["dim"] == 1
    location = nanscan.locate(lambda: torch.add(torch.ones(2), torch.full((2,), 4.0), alpha=1e38))
    assert location.at.settings["alpha"] == 1e38
