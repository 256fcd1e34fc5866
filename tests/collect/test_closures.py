"""optimizer.step(closure): the closure makes the gradients, so they are scanned when it returns."""

import functools

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import NAN, SCOPES, enable, verdicts


class Chain(nn.Sequential):
    """Its backward goes bad behind the second layer while `is_bad`."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.is_bad = False

    def forward(self, x):
        x = self[3](self[2](self[1](self[0](x))))
        if self.is_bad:
            x.register_hook(lambda gradient: gradient * NAN)
        return self[4](x)


class Wrapped:
    """As Lightning wraps an optimizer: the closure runs inside of the optimizer's own step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure):
        return self.optimizer.step(closure=functools.partial(closure))


class Sharp(torch.optim.SGD):
    """As SAM does: it moves parameters along their gradients, and calls the closure again."""

    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=0.1)
        loss = closure()
        super().step()
        return loss


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3),
    "wrapped": lambda p: Wrapped(torch.optim.AdamW(p, 1e-3)),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "sharp": lambda p: Sharp(p, 1e-3),
}


def closure_of(model, seed=0):
    def closure():
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("skip_step", [False, True])
@SCOPES
def test_the_first_bad_gradient_is_named_in_its_step(scope, skip_step, name):
    model = Chain()
    monitor = enable(scope, model, action="log", skip_step=skip_step)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        model.is_bad = step == 2
        optimizer.step(closure_of(model, step))
    assert verdicts(monitor)[:2] == [
        (2, "2.weight grad", "origin"),
        (2, "2.bias grad", "propagated"),
    ]


@SCOPES
def test_gradients_of_the_first_step_have_the_order_of_its_backward(scope):
    """Before the closure ran, no module had."""
    model = Chain()
    monitor = enable(scope, model, action="log")
    model.is_bad = True
    torch.optim.SGD(model.parameters(), 1e-3).step(closure_of(model))
    assert verdicts(monitor)[0] == (0, "2.weight grad", "origin")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_losses_keep_their_bits(name):
    def run():
        model = Chain()
        optimizer = OPTIMIZERS[name](model.parameters())
        losses = [optimizer.step(closure_of(model, step)).item() for step in range(3)]
        return losses, [p.clone() for p in model.parameters()]

    losses, parameters = run()
    with nanscan.watch():
        watched_losses, watched = run()
    assert watched_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, watched, strict=True))


def test_a_closure_keeps_its_attributes_its_errors_and_its_arguments():
    class Adaptive(torch.optim.SGD):
        def step(self, closure):
            seen.append((closure.tag, closure(2, extra=3)))
            return super().step()

    def closure(*args, **kwargs):
        if kwargs["extra"] is None:
            raise KeyError
        return args, kwargs

    closure.tag = "mine"
    seen = []
    model = nn.Linear(2, 2)
    with nanscan.watch(model):
        Adaptive(model.parameters(), 0.1).step(closure)
        assert seen == [("mine", ((2,), {"extra": 3}))]

        def fails():
            raise KeyError("of the user")

        with pytest.raises(KeyError, match="of the user"):
            torch.optim.SGD(model.parameters(), 0.1).step(fails)


@SCOPES
def test_an_optimizer_that_never_calls_its_closure(scope):
    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    model = Chain()
    model.is_bad = True
    monitor = enable(scope, model, action="log")
    optimizer = Deaf(model.parameters(), 1e-3)
    closure_of(model)()
    optimizer.step(lambda: None)
    assert verdicts(monitor)[0] == (0, "2.weight grad", "origin")


def test_parameters_that_the_optimizer_spoils_between_two_calls_of_its_closure():
    class Leaps(torch.optim.SGD):
        def step(self, closure):
            closure()
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(NAN)
            return closure()

    model = Chain()
    monitor = nanscan.enable(model, action="log")
    Leaps(model.parameters(), 1e-3).step(closure_of(model))
    first = monitor.findings[0]
    assert (str(first.site), first.verdict) == ("0.weight param", "origin")
    assert first.how.startswith("its optimizer made it so within this step")
