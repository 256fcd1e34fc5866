"""What tests of optimizer steps share: a model with any optimizer, and loops with a GradScaler."""

import inspect

import torch
from torch import nn

from helpers.models import NAN, Net, batch


class Learner:
    """A small model with an optimizer of some class, which takes steps on given gradients."""

    def __init__(self, name, options):
        torch.manual_seed(0)
        kind = getattr(torch.optim, name)
        self.sparse = name == "SparseAdam"
        self.model = nn.Embedding(5, 4, sparse=True) if self.sparse else Net()
        parameters = [p for p in self.model.parameters() if name != "Muon" or p.dim() == 2]
        options = dict(options)
        if "weight_decay" in inspect.signature(kind).parameters:
            options.setdefault("weight_decay", 0.01)
        if name == "LBFGS":
            options["lr"] = 0.1
            groups = parameters
        else:
            groups = [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}]
            groups = groups if parameters[1:] else groups[:1]
        self.optimizer = kind(groups, **options)
        self.parameters = parameters

    def set_gradients(self, seed, bad):
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters:
            p.grad = torch.randn(p.shape, generator=generator)
            if self.sparse:
                p.grad = p.grad.to_sparse(1)
        if bad is not None:
            grad = self.parameters[-1].grad
            (grad._values() if self.sparse else grad).view(-1)[1] = bad

    def step(self, seed, bad=None):
        """One step on gradients of that seed; those of LBFGS are the loss's own."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.lbfgs_step(seed, 0 if bad is not None else None)
        self.set_gradients(seed, bad)
        return self.optimizer.step()

    def lbfgs_step(self, seed, bad_call):
        calls = 0

        def closure():
            nonlocal calls
            self.optimizer.zero_grad()
            loss = (self.model(batch(seed)) - batch(seed + 1)).square().mean()
            loss.backward()
            if calls == bad_call:
                self.parameters[-1].grad[1] = NAN
            calls += 1
            return loss

        loss = self.optimizer.step(closure)
        assert bad_call is None or calls == bad_call + 1
        return loss

    def state(self):
        """Every bit of parameters and optimizer state."""
        index = {id(p): i for i, p in enumerate(self.parameters)}
        return {
            "parameters": [bits(p) for p in self.parameters],
            "state": {index[id(p)]: bits(s) for p, s in self.optimizer.state.items()},
            "groups": [
                {key: bits(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            "attributes": sorted(vars(self.optimizer)),
        }


def bits(x):
    if isinstance(x, torch.Tensor):
        data = x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(x.dtype), tuple(x.shape), data
    if isinstance(x, dict):
        return {key: bits(value) for key, value in x.items()}
    return [bits(item) for item in x] if isinstance(x, (list, tuple)) else x


def train_scaled(model, optimizer, inputs, scale=8.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for x in inputs:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


class Steep(nn.Module):
    """A model whose gradients reach `slope`."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.fc = nn.Linear(4, 1, bias=False)
        self.slope = slope

    def forward(self, x):
        return self.fc(x).sum() * self.slope


def steps_of_scaler(scaler, model, optimizer, count, *, unscale=False):
    for _ in range(count):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
