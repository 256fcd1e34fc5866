"""Each remedy that a report gives is applied: the fault is gone, and what was fine is as it was.

A case is a loop that runs as it was written, and as the remedy says. It returns what was fine in
the first run, to compare; None where a remedy means to change all values, as a lower rate does.
"""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanscan
from helpers.models import INF, NAN, Do, HandMadeNorm, batch, infer, sgd, train
from nanscan._data.site import DEFAULT_KINDS
from nanscan._judge.causes import RULES

# They say what happened; what to do about it, the op alone can tell.
WITHOUT_REMEDY = {
    "spread_by_clipping",
    "no_loss_scale_helps",
    "all_gradients_nan",
    "undefined_derivative",
    "nan_loss_of_finite_outputs",
}
ELSEWHERE = {"wiped_out"}  # test_all_zero.py: a norm in float32 is not wiped out


@dataclass
class Case:
    """A loop that fails.

    Attributes:
        rule: that names its cause.
        title: part of the title.
        says: part of the remedy that is applied.
        run: the loop; it takes the remedy, or "" to fail, and returns what was fine.
        rtol: by how much that may differ: the precision of the dtype.
    """

    rule: str
    title: str
    says: str
    run: Any
    rtol: float = 1e-6


CASES: list[Any] = []


def case(rule, title, says, rtol=1e-6, **arguments):
    def add(run):
        label = "-".join(
            [rule, *(str(value).removeprefix("torch.") for value in arguments.values())]
        )

        def with_arguments(remedy):
            torch.manual_seed(0)
            return run(remedy, **arguments)

        CASES.append(pytest.param(Case(rule, title, says, with_arguments, rtol), id=label))
        return run

    return add


def watched(run, remedy):
    with nanscan.watch(action=lambda _: None, kinds=(*DEFAULT_KINDS, "state")) as monitor:
        fine = run(remedy)
    return monitor, fine


def number_in(remedy, pattern):
    return float(re.search(pattern, remedy).group(1))


# -- the batch and buffers -------------------------------------------------------------------------


@case("bad_input_batch", "the batch was bad", "torch.isfinite(batch).all()")
def bad_batch(remedy):
    model, inputs = nn.Linear(4, 2), [batch(0), batch(1) * NAN, batch(2)]
    if remedy:
        inputs = [x for x in inputs if torch.isfinite(x).all()]
    infer(model, *inputs)
    return model(batch(0))


@case("bad_buffer", "0.running_mean was bad before 0 ran", "0.reset_running_stats(), then batches")
@case("spoiled_statistics", "running_mean of 0 is non-finite", "0.reset_running_stats()")
def spoiled(remedy):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = sgd(model)
    train(model, optimizer, [batch(0)])
    if not remedy:
        model[0].running_mean[1] = NAN
    else:
        model[0].reset_running_stats()
    train(model, optimizer, [batch(1), batch(2)])
    fine = model(batch(3)).detach()
    infer(model.eval(), batch(3))
    return fine


# -- overflow --------------------------------------------------------------------------------------


@case("overflow", "overflow of float16", "model.bfloat16()", 0.02, scale=2000.0)
@case("overflow", "overflow of float16", "model.bfloat16()", 0.02, scale=30000.0)
@case("growing_to_the_limit", "values grow towards", "model.bfloat16()", 0.02, scale=None)
def large_values(remedy, scale):
    model = nn.Linear(4, 4)
    nn.init.uniform_(model.weight, 5, 10)
    model, dtype = (model.bfloat16(), torch.bfloat16) if remedy else (model.half(), torch.half)
    scales = [scale] if scale else [60.0, 300.0, 1000.0, 1500.0, 4000.0]
    infer(model, *[(batch().abs() * each).to(dtype) for each in (1.0, *scales)])
    return model(batch().abs().to(dtype)).float()


@case("overflow", "overflow of float16", "torch.autocast(device, torch.bfloat16)", 0.05)
@case(
    "branches_of_different_scale",
    "two branches meet here",
    "torch.autocast(device, torch.bfloat16)",
    0.05,
)
def branches(remedy):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            x = self.first(x)
            return self.norm(x + self.second(x))

    model = Block()
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.weight.copy_(torch.eye(4) * 1.01)
            layer.bias.zero_()
    last = torch.tensor([[40000.0], [40000.0], [30000.0]]).expand(3, 4)
    with torch.autocast("cpu", torch.bfloat16 if remedy else torch.float16):
        infer(model, batch(), batch() * 1000, last)
        return model(batch()).float()


@case("mask_on_mask", "additive masks overflow", "torch.minimum(mask, other_mask)", dtype="half")
@case("mask_on_mask", "additive masks overflow", "torch.minimum(mask, other_mask)", dtype="float")
@case("mask_on_mask", "additive masks overflow", "torch.minimum", dtype="bfloat16")
def masks(remedy, dtype):
    dtype = getattr(torch, dtype)
    low = torch.finfo(dtype).min
    causal = torch.zeros(4, 4, dtype=dtype).masked_fill(torch.ones(4, 4).triu(0).bool(), low)
    padding = torch.zeros(4, 4, dtype=dtype)
    padding[0] = low  # the first row sees nothing, by both
    merge = Do(lambda a, b: torch.minimum(a, b) if remedy else a + b)
    after = nn.Softmax(-1)
    scores = torch.randn(4, 4).to(dtype).abs()  # so that the sum with them fits
    return after(merge(causal, padding) + scores)[1:].float()


@case("far_from_unit_scale", "inputs are far from unit scale", "x / 255")
def pixels(remedy):
    model = nn.Linear(4, 4).half()
    nn.init.constant_(model.weight, 66.0)
    x = torch.tensor([[250.0, 255.0, 249.0, 251.0], [3.0, 2.0, 250.0, 255.0]]).half()
    infer(model, x / 255 if remedy else x)


# -- layers ----------------------------------------------------------------------------------------


@case("zero_variance", "divides by a variance of 0", "eps=1e-5", 1e-4, kind="batch")
@case("zero_variance", "divides by a variance of 0", "eps=1e-5", 1e-4, kind="group")
@case("zero_variance", "divides by a variance of 0", "eps=1e-5", 2e-3, kind="half")
@case("zero_variance", "divides by a variance of 0", "eps=1e-5", 2e-3, kind="by hand in half")
def constant_channel(remedy, kind):
    eps = 1e-5 if remedy else 1e-300
    dtype = torch.half if "half" in kind else torch.float
    norm = {
        "batch": lambda: nn.BatchNorm1d(3, eps=eps),
        "group": lambda: nn.GroupNorm(3, 3, eps=eps),
        "half": lambda: nn.GroupNorm(3, 3, eps=eps).half(),
        "by hand in half": lambda: HandMadeNorm(eps),
    }[kind]()
    x = torch.randn(4, 3, 5, dtype=dtype)
    x[:, 1] = 0.5
    return norm(x)[:, [0, 2]].float()


@case("single_sample", "a batch of one sample", "DataLoader(..., drop_last=True)")
def last_batch(remedy):
    model = Do(lambda x: (x - x.mean(0)) / x.std(0))
    data = torch.utils.data.DataLoader(batch(rows=7), batch_size=3, drop_last=bool(remedy))
    outputs = [model(x) for x in data]
    return torch.cat(outputs[:2])


FILL = "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)"


@case("fully_masked_rows", "of the softmax is fully masked", FILL, kind=nn.Softmax, dtype="float")
@case("fully_masked_rows", "of the softmax is fully masked", FILL, kind=nn.Softmax, dtype="half")
@case("fully_masked_rows", "of the softmax is fully masked", FILL, kind=nn.LogSoftmax, dtype="half")
def softmax(remedy, kind, dtype):
    scores = torch.randn(3, 5).to(getattr(torch, dtype))
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    fill = torch.finfo(scores.dtype).min if remedy else -INF
    out = kind(-1)(scores.masked_fill(~mask, fill))
    return out[[0, 2]][mask[[0, 2]]]


@case("fully_masked_rows", "NaN out of -Inf", FILL)
def attention_by_hand(remedy):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.after = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.after((x @ x.mT + mask).softmax(-1) @ x)

    mask = torch.zeros(3, 3)
    mask[0] = torch.finfo(mask.dtype).min if remedy else -INF
    return Attends()(batch(), mask)[1:]


@case("fully_masked_rows", "of an attention is fully masked", "mask[nothing_seen, 0] = False")
def attention(remedy):
    layer = nn.MultiheadAttention(4, 2)
    x, mask = batch(), torch.zeros(3, 3, dtype=torch.bool)
    mask[1] = True
    if remedy:
        mask[mask.all(-1), 0] = False
    return layer(x, x, x, attn_mask=mask)[0][[0, 2]]


@case("mean_over_nothing", "every label is ignored", "F.cross_entropy", kind="CrossEntropyLoss")
@case("mean_over_nothing", "every label is ignored", "F.nll_loss", kind="NLLLoss")
@case("mean_over_nothing", "every label is ignored", "skip such a batch", kind="weighted")
def labels(remedy, kind):
    weight = torch.tensor([0.0, 1.0, 2.0]) if kind == "weighted" else None
    module = nn.NLLLoss if kind == "NLLLoss" else nn.CrossEntropyLoss
    criterion, losses = module(weight=weight, ignore_index=-1), []
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    for y in torch.tensor([[0, 1, -1], [2, 2, 1], [-1, -1, -1]]):
        names = {"F": F, "x": model(batch()).log_softmax(-1), "y": y, "weight": weight}
        if remedy and weight is not None:
            if not eval(remedy.partition(": if ")[2], names):
                continue
            losses.append(criterion(names["x"], y))
        else:
            losses.append(eval(remedy, names) if remedy else criterion(names["x"], y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses[:2])


@case("mean_over_nothing", "a mean over nothing, 0 / 0", "x.mean() if x.numel() else x.sum()")
def empty(remedy):
    criterion = nn.MSELoss()
    outs = [batch(), batch()[:0]]
    if remedy:
        assert outs[1].sum() == 0
        outs = [x for x in outs if x.numel()]
    losses = [criterion(x, x * 0) for x in outs]
    return losses[0]


# -- training --------------------------------------------------------------------------------------


def _square_sum(out):
    return out.square().sum()


@case("learning_rate", "the learning rate is too high", "SGD(..., lr=", kind="line")
@case("learning_rate", "the learning rate is too high", "SGD(..., lr=", kind="momentum")
@case("learning_rate", "the learning rate is too high", "SGD(..., lr=", kind="net")
def diverging(remedy, kind):
    net = kind == "net"
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) if net else nn.Linear(4, 1)
    lr = number_in(remedy, r"lr=([\d.e+-]+)") if remedy else 0.6
    optimizer = sgd(model, lr, momentum=0.9 if kind == "momentum" else 0.0)
    losses = train(model, optimizer, [batch(0)] * 80, _square_sum)
    assert not remedy or losses[-1] < losses[0]


@case("exploding_gradients", "exploding gradients", "torch.nn.utils.clip_grad_value_(model.para")
def exploding(remedy):
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.6)
    for _ in range(80):
        optimizer.zero_grad()
        model(batch(0)).square().sum().backward()
        if remedy:
            exec(remedy.partition(" before")[0], {"torch": torch, "model": model})
        optimizer.step()


@case("overflow_in_backward", "gradients overflow", "torch.autocast(device, torch.bfloat16)", 0.05)
@case("overflow_in_backward", "gradients overflow", "GradScaler(init_scale=1.0)", 1e-3, scaled=True)
@case("overflow_in_backward", "gradients overflow", "model.bfloat16()", 0.05, half=True)
def backward_overflow(remedy, scaled=False, half=False):
    layers = [nn.Linear(2, 2) for _ in range(8)]
    for layer in layers:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*layers)
    wide = torch.bfloat16 if remedy and not scaled else torch.float16
    model = model.to(wide) if half else model
    optimizer = sgd(model, 1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=bool(remedy) and scaled)
    outs = []
    for _ in range(30):
        optimizer.zero_grad()
        x = torch.full((1, 2), 1e-3, dtype=wide if half else torch.float32)
        with torch.autocast("cpu", wide, enabled=not half):
            out = model(x)
        outs.append(out.detach().float())
        scaler.scale((out.float() * 5000).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not remedy or all(p.grad.isfinite().all() for p in model.parameters())
    return outs[0]


@case("loss_scale_too_large", "the loss scale has grown far too large", "scaler.update(2.0**16)")
def grown_scale(remedy):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    for step in range(120):
        labels = torch.randint(0, 3, (5,)) if step >= 60 else torch.full((5,), -1)
        with torch.autocast("cpu", torch.float16):
            out = model(torch.randn(5, 4)).float()
        loss = F.cross_entropy(out, labels, ignore_index=-1, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 60:
            scaler.set_growth_interval(2000)
        if remedy:
            exec(remedy.partition("scaler.update(): ")[2], {"scaler": scaler})
    return out.new_zeros(1)


@case("setting_not_finite", "the learning rate is not finite", "a finite", kind="SGD", lr=INF)
@case("setting_not_finite", "the learning rate is not finite", "a finite", kind="SGD", lr=NAN)
@case("setting_not_finite", "the learning rate is not finite", "a finite", kind="Adam", lr=INF)
@case("setting_not_finite", "the learning rate is not finite", "a finite", kind="AdamW", lr=NAN)
@case("setting_not_finite", "the weight decay is not finite", "a finite", kind="AdamW", decay=INF)
@case("setting_not_finite", "the weight decay is not finite", "a finite", kind="SGD", decay=NAN)
@case("setting_not_finite", "momentum is not finite", "a finite", kind="SGD", momentum=NAN)
def setting(remedy, kind, lr=0.1, decay=0.0, momentum=0.0):
    model = nn.Linear(4, 1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
    group = optimizer.param_groups[0]
    train(model, optimizer, [batch()])
    fine = model.weight.detach().clone()
    changed = {"lr": lr, "weight_decay": decay, **({"momentum": momentum} if momentum else {})}
    if not remedy:
        group.update(changed)
    train(model, optimizer, [batch()] * 2)
    return fine


@case("setting_not_finite", "the learning rate is not finite", "['lr'] = 0.25")
def scheduler(remedy):
    model = nn.Linear(4, 1)
    optimizer = sgd(model, 0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: INF if step == 2 and not remedy else 1.0
    )
    for _ in range(4):
        train(model, optimizer, [batch()])
        schedule.step()


@case("eps_rounds_to_zero", "is 0 in float16", "eps=1e-4", 0.1, kind="Adam")
@case("eps_rounds_to_zero", "is 0 in float16", "eps=1e-4", 0.1, kind="RMSprop")
@case("eps_rounds_to_zero", "is 0 in float16", "eps=1e-4", 0.1, kind="Adagrad")
@case("eps_rounds_to_zero", "is 0 in float16", "parameters in float32", 0.1, kind="Adam", wide=True)
@case(
    "trained_in_half_precision", "trained in float16", "model.float()", 0.1, kind="Adam", wide=True
)
def half_eps(remedy, kind, wide=False):
    model = nn.Linear(4, 3).half()
    wide = wide and bool(remedy)
    model = model.float() if wide else model
    options = {"eps": 1e-4} if remedy and not wide else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **options)
    x = torch.ones(2, 4)
    x[:, 1] = 0
    scaler = torch.amp.GradScaler("cpu", enabled=wide, init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=wide):
            loss = model(x.to(model.weight.dtype)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.weight[:, [0, 2, 3]].detach().float()


@case("second_moment_overflow", "overflows float16", "parameters in float32", 0.01, wide=True)
@case("second_moment_overflow", "overflows float16", "clip_grad_value_", 0.01)
@case("second_moment_overflow", "overflows float32", "clip_grad_value_", dtype="float", top=1e22)
def squares(remedy, wide=False, dtype="half", top=1e4):
    dtype = torch.float if wide and remedy else getattr(torch, dtype)
    model = nn.Linear(4, 3).to(dtype)  # the same values in each dtype
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
    x = torch.full((2, 4), top)
    x[:, 0] = 1e-2
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=wide and bool(remedy)):
            loss = model(x.to(dtype)).float().sum()
        loss.backward()
        if remedy and not wide:
            exec(remedy.rpartition("or ")[2], {"torch": torch, "model": model})
        optimizer.step()
    return model.weight[:, 0].detach().float()


@case("update_too_large", "does not fit into float16", "SGD(..., lr=")
def update(remedy):
    model = nn.Linear(4, 3).half()
    lr = number_in(remedy, r"lr=([\d.e+-]+)") if remedy else 60000.0
    train(model, sgd(model, lr), [torch.ones(2, 4).half()] * 3, torch.sum)


@pytest.fixture
def empty_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@case("uninitialised_parameter", "the parameter was never initialised", "reset_parameters()")
def to_empty(remedy):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model.to_empty(device="cpu")
    for module in model:
        if remedy and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    infer(model, batch())


# -- tests -----------------------------------------------------------------------------------------


def _faults(monitor, rule):
    also = "near-limit" if rule == "growing_to_the_limit" else "origin"
    return [f for f in monitor.findings if f.is_fault or f.verdict == also]


@pytest.mark.usefixtures("empty_is_nan")
@pytest.mark.parametrize("each", CASES)
def test_a_remedy_that_is_applied_is_right(each, num_threads):
    num_threads(1)
    monitor, fine = watched(each.run, "")
    causes = [c for f in monitor.findings for c in f.causes if each.title in c.title]
    assert causes, [c.title for f in monitor.findings for c in f.causes]
    remedy = causes[0].remedy
    assert each.says in remedy
    mended, same = watched(each.run, remedy)
    assert [(str(f.site), f.verdict) for f in _faults(mended, each.rule)] == []
    if fine is not None:
        assert fine.isfinite().all()
        torch.testing.assert_close(same, fine, rtol=each.rtol, atol=each.rtol)


def test_each_rule_has_its_remedy_applied_or_gives_none():
    named = {rule.name for rule in RULES}
    assert {each.values[0].rule for each in CASES} | WITHOUT_REMEDY | ELSEWHERE == named
    assert not {each.values[0].rule for each in CASES} & WITHOUT_REMEDY
