"""Random programs with one fault planted in them: locate names the op and its line, every time.

It has to agree with how the program was written, and with a naive reference: a dispatch mode that
asks isfinite() of every operand and every result.
"""

import linecache
import sys

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.located import garbage

FILE = "<a random program>"
MASK = torch.tensor([[False, True, False], [True, True, False]])

# Each makes {n} of {a}, the latest, and {b}, any one before; [2, 3], finite and of moderate size.
SAFE = (
    "{n} = torch.sin({a})",
    "{n} = torch.tanh({a}) + {b}",
    "{n} = torch.sin({a} * {b})",
    "{n} = torch.sin({a} @ {b}.t() @ {a})",
    "{n} = torch.cat([{a}[:1], {b}[1:]])",
    "{n} = {a}.reshape(3, 2).t().reshape(3, 2).view(2, 3)",
    "{n} = {a}.sum(0, keepdim=True).expand(2, 3) * 0.1",
    "{n} = {a}.to(torch.bfloat16).float()",
    "{n} = torch.layer_norm({a}, (3,))",
    "{n} = checkpoint(torch.sin, {a}, use_reentrant=False)",
    "{n} = checkpoint(torch.sin, {a}, use_reentrant=True)",
    "{n} = torch.stack(torch._foreach_mul([{a}, {b}], 0.5)).sum(0)",
    "{n} = (torch.sin({a}) + torch.zeros(2, 3).masked_fill(MASK, -torch.inf)).softmax(-1)",
    "{n} = {a}.clone()\n{n}[0] = {b}[1]",
    "{n} = ({a} * 1).contiguous()\n{n}.view(-1)[2:4].mul_(0.5)",
    "{n} = garbage(torch.empty(2, 3))\n{n}[0] = {a}[1]\n{n}[1:] = {b}[:1]",
    "{n} = garbage(torch.empty(2, 3))\ntorch.sin({b}.detach(), out={n})\n{n} = {n} + {a}",
    "{n} = {a} * 1\n{n}.data.mul_(0.5)",
    "with torch.no_grad():\n    {n} = torch.sin({b})\n{n} = {n} + {a}",
)
BAD_FORWARD = (
    ("aten.div.Tensor", "{n} = {a} / 0"),
    ("aten.log.default", "{n} = ({a}.abs() + 1).neg().log()"),
    ("aten.exp.default", "{n} = ({a}.abs() + 100).exp()"),
    ("aten.mul.Tensor", "{n} = ({a}.abs() + 100) * 1e37"),
    ("aten._to_copy.default", "{n} = ({a}.abs() + 1e5).half().float()"),
    ("aten.mm.default", "{n} = ({a}.abs() + 1e25) @ torch.full((3, 3), 1e25)"),
    ("aten._foreach_div.Scalar", "({n},) = torch._foreach_div([{a}], 0.0)"),
    ("aten.div_.Tensor", "{n} = ({a} * 1).div_(0)"),
    ("aten.div_.Tensor", "{n} = {a} * 1; {n}[:, 1:].div_(0)"),
    ("aten.log_.default", "{n} = {a} * 0; {n}.t()[1].log_(); {n} = {n} * 1"),
    ("aten.div_.Tensor", "{n} = {a} * 1; {n}.data.div_(0); {n} = {n} * 1"),
    (
        "aten.div.out",
        "{n} = torch.div({a}.detach(), 0 * {b}.detach(), out=torch.empty(2, 3)) + {a}",
    ),
    ("aten.div.Tensor", "{n} = checkpoint(lambda x: x / 0, {a}, use_reentrant=False)"),
    ("aten.div.Tensor", "{n} = checkpoint(lambda x: x / 0, {a}, use_reentrant=True)"),
)
BAD_BACKWARD = (
    ("SqrtBackward0", 0, "{n} = ({a} * 0).sqrt()"),
    ("PowBackward0", 0, "{n} = ({a} * 0) ** 0.5"),
    ("RsqrtBackward0", 0, "{n} = ({a} * 0 + 1e-30).rsqrt() * 1e-15"),
    ("AsinBackward0", 0, "{n} = ({a} * 0 + 1).asin()"),
    ("SqrtBackward0", 0, "{n} = checkpoint(lambda x: (x * 0).sqrt(), {a}, use_reentrant=False)"),
    ("SqrtBackward0", 0, "{n} = checkpoint(lambda x: (x * 0).sqrt(), {a}, use_reentrant=True)"),
    ("CopySlices", 0, "{n} = {a} * 0; {n}[1:].sqrt_()"),
    ("SecondBackward", 1, "{n} = Second.apply({b}, {a} * 1)"),
)


class Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        return gradient, _inverse(gradient * 0)


def _inverse(x):
    return 1 / x


class Naive(TorchDispatchMode):
    """The first op that made non-finite values of finite ones, and the line of the program."""

    def __init__(self):
        super().__init__()
        self.first = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        by_name = {argument.name: argument for argument in schema.arguments}
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(by_name[name], value) for name, value in kwargs.items()]
        name = schema.name.split("::")[1]
        constants = [x for _, x in given if isinstance(x, float)]
        inputs, written = [], []
        for argument, value in given:
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            written += tensors if is_written else []
            if not (is_written and (argument.is_out or name in ("copy_", "fill_", "zero_"))):
                inputs += tensors
        was_finite = all(map(_is_finite, inputs)) and all(
            map(torch.isfinite, map(torch.tensor, constants))
        )
        out = func(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        is_finite = all(map(_is_finite, [*results, *written]))
        if self.first is None and was_finite and not is_finite and "empty" not in name:
            overload = schema.overload_name or "default"
            node = torch._C._current_autograd_node()
            self.first = f"aten.{name}.{overload}", _line(), node and node.name()
        return out


def _is_finite(x):
    return not x.is_floating_point() or x._is_zerotensor() or bool(x.isfinite().all())


def _line():
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != FILE:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


@st.composite
def programs(draw, planted):
    """A program's source; the statement that is planted in it, and its line."""
    statements = draw(st.lists(st.sampled_from(SAFE), min_size=1, max_size=8))
    place = draw(st.integers(0, len(statements)))
    plant = draw(st.sampled_from(planted))
    statements.insert(place, plant[-1])
    lines = ["t0 = torch.rand(2, 3) + 0.5", "t1 = torch.rand(2, 3) - 0.5", "t1.requires_grad_()"]
    line = 0
    for number, statement in enumerate(statements, start=2):
        if number == place + 2:
            line = len(lines) + 2
        other = draw(st.integers(0, number - 1))
        text = statement.format(n=f"t{number}", a=f"t{number - 1}", b=f"t{other}")
        lines += text.splitlines()
    names = ", ".join(f"t{number}" for number in range(len(statements) + 2))
    lines += [f"kept.extend([{names}])", f"t{len(statements) + 1}.sum().backward()"]
    source = "\n".join(["def program():", *(f"    {text}" for text in lines)]) + "\n"
    return source, plant, line


def _compiled(source):
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    names = {
        "ZEROS": torch.zeros(2, 3),
        "torch": torch,
        "garbage": garbage,
        "checkpoint": checkpoint,
        "MASK": MASK,
    }
    names |= {"Second": Second, "kept": []}
    exec(compile(source, FILE, "exec"), names)

    def run():
        torch.manual_seed(0)
        names["kept"].clear()
        names["program"]()
        return names["kept"]

    return run


def _reference(run):
    with Naive() as naive:
        run()
    return naive.first


SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(programs(BAD_FORWARD))
def test_forward(program):
    source, (op, _), line = program
    run = _compiled(source)
    assert _reference(run) == (op, line, None)
    location = nanscan.locate(run)
    assert (location.op, location.file, location.line) == (op, FILE, line)
    assert (location.verdict, location.direction) == ("origin", "forward")


@SETTINGS
@given(programs(BAD_BACKWARD))
def test_backward(program):
    source, (node, index, _), line = program
    run = _compiled(source)
    op, _, ran_in = _reference(run)
    assert ran_in.rpartition("::")[2] == node
    assume(not run()[1].grad.isfinite().all())  # else what was made was dropped again
    location = nanscan.locate(run)
    assert (location.op, location.node, location.output_index) == (op, node, index)
    assert (location.verdict, location.direction) == ("origin", "backward")
    if node != "SecondBackward":  # whose own line is told
        assert (location.file, location.line) == (FILE, line)
    else:
        assert location.code == "return 1 / x"


@SETTINGS
@given(programs([("", SAFE[0])]))
def test_nothing_planted(program):
    run = _compiled(program[0])
    assert _reference(run) is None
    assert nanscan.locate(run) is None
