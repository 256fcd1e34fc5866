"""locate, backward: the node, its output, and the forward line that created it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.located import Faults, marked, where

HALF = torch.float16
faults = Faults()


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


# -- nodes and their outputs -----------------------------------------------------------------------


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def where_trap():
    x = leaf(0.0, 1.0)
    y = torch.where(x > 0, x.sqrt(), 0)  # here
    y.sum().backward()


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def square_root_of_zero():
    x = leaf(0.0, 0.0)
    length = (x**2).sum().sqrt()  # here
    length.backward()


@faults("aten.mul.Scalar", "AddBackward0", 1)
def second_operand_of_a_sum():
    a, b = leaf(1.0, dtype=HALF), leaf(0.0, dtype=HALF)
    y = torch.add(a * 1, b * 1, alpha=100)  # here
    y.backward(torch.full((1,), 6e4, dtype=HALF))


@faults("aten.mul.Tensor", "MulBackward0", 0)
def first_operand_of_a_product():
    a, b = leaf(1.0, dtype=HALF), leaf(3.0, dtype=HALF)
    y = a * b  # here
    y.backward(torch.full((1,), 3e4, dtype=HALF))


@faults("aten.mul.Tensor", "MulBackward0", 1)
def second_operand_of_a_product():
    a, b = leaf(3.0, dtype=HALF), leaf(1.0, dtype=HALF)
    y = a * b  # here
    y.backward(torch.full((1,), 3e4, dtype=HALF))


@faults("aten.div.Tensor", "DivBackward0", 1)
def divisor():
    a, b = leaf(1.0), leaf(1e-20)
    y = a / b  # here
    y.backward()


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def one_of_a_concatenation():
    a, b = leaf(1.0, 4.0), leaf(1.0, 0.0)
    root = (b * b).sqrt()  # here
    torch.cat([a.sqrt(), root]).sum().backward()


@faults("aten.mm.default", "MmBackward0", 1)
def weight_gradient():
    x = torch.full((2, 2), 3e30)
    w = torch.zeros(2, 2, requires_grad=True)
    y = x @ w  # here
    (y * 1e20).sum().backward()


@faults("aten.add.Tensor", "MulBackward0")
def sum_of_the_gradients_of_two_uses():
    x = leaf(1.0, dtype=HALF)
    y = x * 1
    z = y * 1  # here
    (y + z).backward(torch.full((1,), 4e4, dtype=HALF))


@faults("aten.add_.Tensor", "AccumulateGrad")
def accumulation_in_a_leaf():
    x = leaf(1.0, dtype=HALF)
    gradient = torch.full((1,), 4e4, dtype=HALF)
    (x * 1).backward(gradient)
    (x * 1).backward(gradient)  # here


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def view():
    x = leaf(0.0, 1.0, 2.0, 3.0)
    y = (x * 1).view(2, 2)[0].sqrt()  # here
    y.sum().backward()


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def in_place():
    x = leaf(0.0, 1.0)
    y = x * 1
    y.sqrt_()  # here
    y.sum().backward()


@faults("aten.div.Tensor", "DivBackward0", 1)
def in_place_on_what_its_backward_needs():
    x = leaf(1.0, 1.0)
    y = leaf(1e-20, 1.0)
    z = x * 1
    z.div_(y)  # here
    z.sum().backward()


@faults("aten.div.Tensor", "CopySlices", 0)
def in_place_through_a_view():
    x = leaf(0.0, 0.0, 1.0, 1.0)
    y = x * 1
    y[1:].sqrt_()  # here
    y.detach().sum()
    y.sum().backward()


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def autocast():
    w = torch.zeros(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = (torch.ones(2, 2) @ w).sqrt()  # here
    y.float().sum().backward()


# -- custom Functions ------------------------------------------------------------------------------


class SecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        _, b = ctx.saved_tensors
        return gradient * 2, gradient / (b - b)  # here


@faults("aten.div.Tensor", "SecondGradientBackward", 1, marked_in=SecondGradient)
def custom_function():
    SecondGradient.apply(leaf(1.0), leaf(2.0)).backward()


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 0  # here

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@faults("aten.div.Tensor", marked_in=BadForward)
def forward_of_a_custom_function():
    BadForward.apply(leaf(1.0)).backward()


# -- ways to run a backward ------------------------------------------------------------------------


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def autograd_grad():
    x = leaf(0.0, 1.0)
    y = x.sqrt()  # here
    return torch.autograd.grad(y.sum(), x)


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def several_backwards_and_retained_graphs():
    x = leaf(0.0, 1.0)
    y = x * 2
    z = y.square().sum()
    root = y.sqrt().sum()  # here
    z.backward(retain_graph=True)
    z.backward(retain_graph=True)
    root.backward(retain_graph=True)
    z.backward()


@faults("aten.pow.Tensor_Scalar", "PowBackward0", 0)
def double_backward():
    x = leaf(0.0, 1.0)
    y = x**1.5  # here
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gradient.sum().backward()


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def func_grad():
    def root(x):
        return x.sqrt().sum()  # here

    return torch.func.grad(root)(torch.zeros(2))


@faults("aten.div.Tensor", "SqrtBackward0", 0)
def func_vmap_of_grad():
    return torch.func.vmap(torch.func.grad(torch.sqrt))(torch.zeros(2))  # here


# -- the user's code inside of a backward ----------------------------------------------------------


@faults("aten.div.Tensor", "MulBackward0", 0)
def hook_on_a_tensor():
    x = leaf(0.0, 1.0)
    y = x * 2
    y.register_hook(lambda gradient: gradient / 0)  # here
    y.sum().backward()


@faults("aten.div.Tensor", "AccumulateGrad")
def hook_on_a_leaf():
    x = leaf(0.0, 1.0)
    x.register_hook(lambda gradient: gradient / 0)  # here
    (x * 2).sum().backward()


@faults("aten.div_.Tensor", "AccumulateGrad")
def hook_after_accumulation():
    def spoil(parameter):
        parameter.grad.div_(0)  # here

    x = leaf(0.0, 1.0)
    x.register_post_accumulate_grad_hook(spoil)
    (x * 2).sum().backward()


@faults("aten.div.Tensor", "BackwardHookFunctionBackward")
def backward_hook_of_a_module():
    model = nn.Linear(3, 3)
    model.register_full_backward_hook(lambda _m, gradients, _o: (gradients[0] / 0,))  # here
    model(torch.randn(2, 3, requires_grad=True)).sum().backward()


# -- modules of torch ------------------------------------------------------------------------------


@faults("aten.native_layer_norm_backward.default", "NativeLayerNormBackward0", 0)
def layer_norm():
    x = torch.full((2, 4), 1.0, requires_grad=True)
    y = nn.functional.layer_norm(x, (4,), eps=1e-45)  # here
    (y * torch.randn(2, 4) * 1e30).sum().backward()


@faults.test
def test_the_node_and_the_forward_line(function, expected):
    location = nanscan.locate(function)
    assert where(location) == expected
    assert location.file == __file__


# -- more of what is said --------------------------------------------------------------------------


class Roots(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.below(x)
        root = torch.where(y > 0, y.sqrt(), 0)  # here
        return root * 3


def test_the_module_and_operands_of_the_forward_op():
    model = nn.Sequential(nn.Identity(), Roots())
    location = nanscan.locate(lambda: model(torch.zeros(2, 4)).sum().backward())
    expected = ("aten.div.Tensor", marked(Roots), "origin", "backward", "SqrtBackward0", 0)
    assert where(location) == expected
    assert (location.module, location.forward.module_type) == ("1", "Roots")
    assert location.forward.name == "aten.sqrt.default"
    assert location.consumers == ("aten.where.self",)
    (operand,) = location.forward.operands
    assert (operand.stats.min, operand.stats.max, operand.shape) == (0, 0, (2, 4))
    gradient, divisor = location.operands
    assert gradient.stats.absmax == 0  # where() let nothing through
    assert divisor.stats.absmax == 0
    assert location.at.results[0].stats.nan_count == 8


def test_the_module_of_a_custom_function():
    class Model(nn.Module):
        def forward(self, a, b):
            return SecondGradient.apply(a, b)

    model = nn.Sequential()
    model.add_module("inner", Model())
    location = nanscan.locate(lambda: model.inner(leaf(1.0), leaf(2.0)).backward())
    assert location.line == marked(SecondGradient)
    assert (location.module, location.forward.module_type) == ("Model", "Model")


def test_which_gradient_was_first_is_said():
    """Two roots of zero in one sum: autograd runs the later one first."""

    def function():
        x, y = leaf(0.0), leaf(0.0)
        a = x.sqrt()
        b = y.sqrt()  # here
        (a + b).backward()

    assert nanscan.locate(function).line == marked(function)


# -- checkpoints -----------------------------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [True, False])
AS_MODULE = pytest.mark.parametrize("as_module", [True, False])


class Checkpointed(nn.Module):
    def __init__(self, function, *, reentrant, as_module):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.part = Part(function)
        self.function = self.part if as_module else function
        self.reentrant = reentrant

    def forward(self, x):
        y = checkpoint(self.function, self.inner(x), use_reentrant=self.reentrant)
        return y.sum()


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _step(function, *, reentrant, as_module):
    model = Checkpointed(function, reentrant=reentrant, as_module=as_module)
    location = nanscan.locate(lambda: model(torch.randn(2, 3)).backward())
    if as_module:
        assert location.module == "part"
    return location


@REENTRANT
@AS_MODULE
def test_bad_in_the_first_forward(reentrant, as_module):
    def function(x):
        y = x - x
        return x / y  # here

    location = _step(function, reentrant=reentrant, as_module=as_module)
    assert where(location) == ("aten.div.Tensor", marked(function), "origin", "forward", "", None)
    assert not location.recomputed


@REENTRANT
@AS_MODULE
def test_bad_in_the_recomputation_alone(reentrant, as_module):
    runs = []

    def function(x):
        runs.append(x)
        y = x.exp()
        z = y / (2 - len(runs))  # here
        return z * z

    location = _step(function, reentrant=reentrant, as_module=as_module)
    assert where(location) == ("aten.div.Tensor", marked(function), "origin", "forward", "", None)
    assert location.recomputed


@REENTRANT
@AS_MODULE
def test_bad_in_the_backward_of_a_recomputed_op(reentrant, as_module):
    def function(x):
        y = x - x
        return y.sqrt()  # here

    location = _step(function, reentrant=reentrant, as_module=as_module)
    expected = ("aten.div.Tensor", marked(function), "origin", "backward", "SqrtBackward0", 0)
    assert where(location) == expected
    assert not location.recomputed


@REENTRANT
def test_after_a_checkpoint_modules_are_told_right(reentrant):
    """A checkpoint that has all it needs leaves a module by an exception."""
    model = Checkpointed(torch.exp, reentrant=reentrant, as_module=True)

    def function():
        model(torch.randn(2, 3)).backward()
        return torch.ones(2) / 0  # here

    location = nanscan.locate(function)
    assert where(location)[:4] == ("aten.div.Tensor", marked(function), "origin", "forward")
    assert (location.module, location.recomputed) == ("", False)


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ({"foreach": False}, "aten.addcdiv_.default"),
        ({"foreach": True}, "aten._foreach_addcdiv_.ScalarList"),
        ({"fused": True}, "aten._fused_adam_.default"),
    ],
    ids=str,
)
def test_optimizers(options, op):
    def function():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), eps=0.0, **options)
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()  # here

    location = nanscan.locate(function)
    assert where(location) == (op, marked(function), "origin", "optimizer", "", None)
    whats = " ".join(o.what for o in location.operands)
    assert "exp_avg of" in whats
    assert "in an optimizer step" in str(location)


class Divider(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.div_(parameter.grad)  # here


def test_an_optimizer_of_the_user():
    def function():
        x = leaf(1.0, 2.0)
        x.grad = torch.zeros(2)
        Divider([x]).step()

    expected = ("aten.div_.Tensor", marked(Divider), "origin", "optimizer", "", None)
    assert where(nanscan.locate(function)) == expected


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_no_part_of_the_optimizer(kind):
    x = leaf(1.0, 2.0)
    optimizer = kind([x], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = (x / 0).sum()  # here
        loss.backward()
        return loss

    location = nanscan.locate(optimizer.step, closure)
    assert where(location) == ("aten.div.Tensor", marked(closure), "origin", "forward", "", None)


def test_clipping():
    """The norm overflows, and clipping multiplies all gradients by 0: nothing is NaN or Inf."""

    def function():
        x = leaf(1.0, 2.0)
        (x * 1e30).sum().backward()
        torch.nn.utils.clip_grad_norm_([x], 1.0)  # here

    location = nanscan.locate(function)
    expected = ("aten._foreach_norm.Scalar", marked(function), "wiped-out")
    assert where(location)[:3] == expected
    assert location.operands[0].stats.is_finite
    assert location.hidden_by.name.startswith("aten._foreach_mul_")
