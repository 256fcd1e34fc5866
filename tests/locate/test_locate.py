"""locate, forward: the op, the user's line, the module, and what the operands held."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import nanscan
from helpers.located import Faults, garbage, marked, where
from helpers.models import INF, NAN

faults = Faults()


# -- which op, and which line ----------------------------------------------------------------------


@faults("aten.div.Tensor")
def division():
    x = torch.zeros(3)
    return x / x  # here


@faults("aten.add.Tensor")
def sum_that_overflows():
    x_1, x_3 = torch.full((4,), 6e4).half(), torch.full((4,), 1e4).half()
    return x_1 + x_3  # here


@faults("aten.mm.default")
def product_of_matrices():
    x = torch.full((4, 4), 1e20)
    y = x * 2
    return (y @ y).sum()  # here


@faults("aten.exp.default")
def first_of_several():
    x = torch.full((3,), 100.0)
    y = x.exp()  # here
    z = (x - x) / (x - x)
    return y + z


@faults("aten.div.Tensor")
def line_of_the_innermost_user_function():
    def inner(x):
        return x / 0  # here

    return F.relu(inner(torch.ones(3)))


@faults("aten._to_copy.default")
def autocast_cast():
    with torch.autocast("cpu", torch.float16):
        x = torch.full((2, 2), 1e6)
        return x @ x  # here


@faults("aten._to_copy.default")
def cast():
    return torch.full((2,), 7e4).to(torch.float16)  # here


@faults("aten.div_.Tensor")
def in_place():
    x = torch.ones(3)
    x.div_(0)  # here
    return x * 2


@faults("aten.div.out")
def out_argument():
    out = torch.empty(3)
    torch.div(torch.ones(3), torch.zeros(3), out=out)  # here
    return out * 2


@faults("aten.exp.out")
def out_is_a_view():
    out = torch.zeros(2, 3)
    torch.exp(torch.full((3,), 100.0), out=out[1])  # here
    return out * 2


@faults("aten.div_.Tensor")
def in_place_through_a_view():
    buffer = torch.ones(4)
    buffer[1:] /= 0  # here
    return buffer * 2


@faults("aten.div_.Tensor")
def through_data():
    weight = torch.ones(4, requires_grad=True)
    y = weight * 2
    weight.data.div_(0)  # here
    return y + weight * 2


@faults("aten.exp.default")
def written_into_a_buffer():
    buffer = torch.zeros(4)
    buffer[0] = torch.full((), 1e3).exp()  # here
    return buffer * 2


@faults("aten.logspace.default")
def factory_function():
    return torch.logspace(0, 100, 3)  # here


@faults("aten._foreach_div.Scalar")
def foreach():
    first, second = torch._foreach_div([torch.ones(2), torch.zeros(2)], 0.0)  # here
    return first, second


@faults("aten.div.Tensor")
def view_of_what_is_bad():
    x = torch.ones(2, 3) / torch.tensor([[1.0], [0.0]])  # here
    return x.view(3, 2).t()[0].reshape(-1).expand(2, -1)


@faults("aten.log.default")
def no_grad():
    with torch.no_grad():
        return (-torch.ones(2)).log()  # here


@faults("aten.div_.Tensor")
def inference_mode():
    with torch.inference_mode():
        x = torch.ones(2) * 2
        x.sub_(1).add_(1)
        x.div_(0)  # here
        return x + 1


@faults("aten.log.default")
def vmap():
    return torch.func.vmap(lambda x: (x * 2).log())(-torch.ones(2, 2))  # here


@faults("aten.div.Tensor")
def jvp():
    x = torch.zeros(2)
    return torch.func.jvp(torch.sqrt, (x,), (x + 1,))  # here


@torch.jit.script
def _scripted(x):
    y = x * 2
    return y.log()


@faults("aten.log.default")
def scripted():
    return _scripted(-torch.ones(2))  # here


@torch.compile
def _compiled(x):
    y = x * 2
    return y.log()  # here


@faults("aten.log.default", marked_in=_compiled)
def compiled_runs_eagerly():
    return _compiled(-torch.ones(2))


@faults("aten.div.Tensor")
def complex_numbers():
    x = torch.ones(2, dtype=torch.complex64)
    return x / 0  # here


@faults("aten.div.Tensor")
def conjugate_view():
    x = torch.full((2,), 1 - 1j).conj().imag
    return (x + 1) / (x - x)  # here


@faults("aten.div.Tensor")
def sparse():
    x = torch.eye(2).to_sparse()
    return (x / 0).to_dense()  # here


@faults("aten.div.Tensor")
def nested():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return x / 0  # here


class _Tagged(torch.Tensor):
    pass


@faults("aten.div.Tensor")
def subclass():
    return torch.ones(2).as_subclass(_Tagged) / 0  # here


@faults("aten.mean.default")
def mean_of_nothing():
    return torch.ones(0).mean()  # here


@faults("aten.var.correction")
def variance_of_one():
    return torch.randn(1, 4).var(0)  # here


@faults("aten._softmax.default")
def softmax_of_a_fully_masked_row():
    scores = torch.randn(2, 4).masked_fill(torch.tensor([[True], [False]]), -INF)
    return scores.softmax(-1)  # here


@faults("aten.log.default")
def log_of_zero_that_meets_zero():
    p = torch.tensor([0.0, 1.0])
    q = p.log()  # here
    return (p * q).sum()


@faults("aten.log.default")
def minus_infinity_that_is_returned():
    return torch.tensor([0.0, 1.0]).log()  # here


@faults("aten.mul.Tensor")
def mask_that_becomes_nan():
    keep = torch.tensor([0.0, 1.0])
    mask = torch.tensor([-INF, 0.0])
    return (keep * mask).sum()  # here


@faults("aten.log_.default")
def minus_infinity_written_through_a_view():
    buffer = torch.zeros(2, 3)
    row, flat = buffer[0], buffer.view(-1)
    row.log_()  # here
    torch.zeros(3).masked_fill(torch.ones(3).bool(), -INF)
    return flat * 0


@faults("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention():
    q = torch.full((1, 1, 4, 8), 1e30)
    return F.scaled_dot_product_attention(q, q, q)  # here


@faults("higher_order.flex_attention")
def higher_order_op():
    q = torch.full((1, 1, 16, 8), 1e30)
    return flex_attention(q, q, q)  # here


@faults("aten.empty.memory_format")
def memory_that_nothing_was_written_to():
    buffer = torch.empty(4, 3)  # here
    garbage(buffer)[2:] = 1
    return buffer * 2


@faults("aten.mul.Tensor", verdict="propagated")
def what_was_bad_before():
    return _OUTSIDE * 2  # here


_OUTSIDE = torch.tensor([1.0, NAN])


@faults.test
def test_the_op_and_its_line(function, expected):
    location = nanscan.locate(function)
    assert where(location) == expected
    assert location.file == __file__


# -- what is searched ------------------------------------------------------------------------------


@pytest.mark.host_only(reason="of a device it is told too late")
def test_what_no_op_wrote():
    def function():
        x = torch.ones(3)
        garbage(x)
        return x * 2  # here

    expected = ("aten.mul.Tensor", marked(function), "propagated", "forward", "", None)
    assert where(nanscan.locate(function)) == expected


def test_only_this_thread_is_searched():
    made = []

    def function():
        thread = threading.Thread(target=lambda: made.append(torch.zeros(2).log().neg()))
        thread.start()
        thread.join()
        return made[0] + 1  # here

    location = nanscan.locate(function)
    assert where(location)[:3] == ("aten.add.Tensor", marked(function), "propagated")


def test_arguments_are_handed_on():
    seen = []
    assert nanscan.locate(lambda *args, **kwargs: seen.append((args, kwargs)), 1, 2, a=3) is None
    assert seen == [((1, 2), {"a": 3})]


def test_the_step():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    with nanscan.locating() as search:
        for step in range(4):
            optimizer.zero_grad()
            loss = (parameter / (3 - step)).square().sum()
            loss.backward()
            optimizer.step()
            assert (search.location is None) == (step < 3)
    assert (search.location.step, search.location.op) == (3, "aten.div.Tensor")
