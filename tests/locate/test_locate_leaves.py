"""locate leaves no trace: results, memory, hooks and modes are as they would be without it."""

import gc
import logging
import threading
import tracemalloc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nanscan
from helpers.located import marked, where

# -- results ---------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Random numbers, statistics, views, in-place ops, a checkpoint, attention, autocast."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.recurrent(x)[0]
        x = x + checkpoint(self.part, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x.float().clone()
        x[:, 0] *= 0.5
        return self.head(x + torch.randn_like(x))


def _train(kind, options, steps=4):
    torch.manual_seed(1)
    model = Everything()
    optimizer = kind(model.parameters(), 1e-2, **options)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = torch.randint(0, 16, (3, 5))
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward(retain_graph=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results += [loss, logits, norm, *(p.grad.clone() for p in model.parameters())]
    states = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [*results, *model.state_dict().values(), *states, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
    ],
    ids=str,
)
def test_results_are_the_same_bit_by_bit(kind, options):
    expected = _train(kind, options)
    with nanscan.locating() as search:
        results = _train(kind, options)
    assert search.location is None
    assert len(results) == len(expected) > 100
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_results_are_the_same_after_something_was_found():
    x = torch.linspace(-1, 1, 9, requires_grad=True)

    def function():
        return (x.log() * x.exp()).sin()

    expected = function()
    with nanscan.locating() as search:
        first = function()
        second = function()
    assert search.location.op == "aten.log.default"
    for ours in (first, second):
        assert torch.equal(ours.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(ours.isnan(), expected.isnan())


def test_zeros_without_memory():
    """They come up in a double backward; torch crashes on some of them under a dispatch mode."""

    def function():
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        y = torch.stack(torch._foreach_mul([x], 0.5)).sum(0).abs()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gradient.sum() + (x**3).sum()).backward()
        return gradient, x.grad

    expected = function()
    results = []
    assert nanscan.locate(lambda: results.extend(function())) is None
    assert all(map(torch.equal, results, expected))


# -- memory ----------------------------------------------------------------------------------------


def test_tensors_die_as_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    references = []

    def note(_module, _args, output):
        references.append(weakref.ref(output))

    for module in model:
        module.register_forward_hook(note)
    with nanscan.locating():
        scratch = torch.randn(3)
        references.append(weakref.ref(scratch))
        del scratch
        assert references[0]() is None
        loss = model(torch.randn(2, 4)).sum()
        assert references[1]() is None  # autograd keeps what tanh returned, and not what it took
        loss.backward()
        references.append(weakref.ref(loss))
        del loss
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


def test_models_and_gradients_die_with_the_search_still_there():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with nanscan.locating() as search:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    references = [
        weakref.ref(x)
        for x in (model, optimizer, model.weight, *optimizer.state[model.weight])
        if not isinstance(x, str)
    ]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert search.location is None


def _held(steps):
    """Bytes of Python objects after some steps."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with nanscan.locating():
        for step in range(steps):
            if step == steps // 3:
                gc.collect()
                tracemalloc.start()
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return size


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("nanscan._locate.search._MAX_FORWARD", 100)
    _held(9)
    few, many = _held(60), _held(300)
    assert many < few + 60_000  # one list kept of each op would be 500,000


def test_without_an_optimizer_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("nanscan._locate.search._MAX_EVENTS", 100)
    x = torch.randn(8)
    with nanscan.locating() as search:
        for _ in range(500):
            (x * 2).tanh()
            assert len(search._events) < 100
            assert len(search._trace._values) < 400
        y = x / 0  # here
    assert search.location.op == "aten.div.Tensor"
    assert y.isinf().all()


# -- exceptions ------------------------------------------------------------------------------------


class Interrupted(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.error = error

    def forward(self, x):
        self.fc(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("of the user"), KeyboardInterrupt(), SystemExit()])
def test_exceptions_pass_and_leave_nothing(error):
    model = nn.Sequential(Interrupted(error))
    with pytest.raises(type(error)) as raised:
        nanscan.locate(model, torch.randn(2, 2))
    assert raised.value is error


@pytest.mark.parametrize("where_", ["hook", "function"])
def test_exceptions_in_a_backward(where_):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            gradient * 2
            raise ValueError("of the user")

    def hook(gradient):
        gradient * 2
        raise ValueError("of the user")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    if where_ == "hook":
        y.register_hook(hook)
    else:
        y = Raises.apply(y)
    with pytest.raises(ValueError, match="of the user"):
        nanscan.locate(y.sum().backward)
    assert nanscan.locate(lambda: (x * 2).sum().backward()) is None


def test_what_was_found_before_an_exception_is_returned(caplog):
    def function():
        y = torch.ones(2) / 0  # here
        raise ValueError(y)

    with caplog.at_level(logging.WARNING, "nanscan"):
        location = nanscan.locate(function)
    assert where(location)[:2] == ("aten.div.Tensor", marked(function))
    assert "the code that was searched raised" in caplog.text


def test_an_exception_that_the_code_catches():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError(x)

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Raises()

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                return x / 0  # here

    location = nanscan.locate(Tries(), torch.ones(2))
    assert where(location)[:2] == ("aten.div.Tensor", marked(Tries))
    assert location.module == "Tries"


def test_an_exception_in_a_block():
    search = nanscan.locating()
    with pytest.raises(ZeroDivisionError), search:
        (torch.ones(2) / torch.zeros(2)).tolist().append(1 / 0)
    assert search.location.op == "aten.div.Tensor"


# -- several searches, and a monitor ---------------------------------------------------------------


def test_one_search_in_another():
    with nanscan.locating() as outer:
        with nanscan.locating() as inner:
            torch.ones(2) / 0
        assert inner.location.op == "aten.div.Tensor"
        torch.ones(2) * 2
    assert outer.location.op == "aten.div.Tensor"
    assert outer.location.line == inner.location.line


def test_one_search_after_another():
    search = nanscan.locating()
    with search:
        torch.ones(2) * 2
    assert search.location is None
    with search:
        torch.ones(2) / 0
    assert search.location.op == "aten.div.Tensor"


def test_the_same_search_twice_at_once():
    search = nanscan.locating()
    with search, pytest.raises(RuntimeError, match="under way already"), search:
        pass
    assert nanscan.locate(lambda: torch.ones(2) * 2) is None


def test_searches_in_several_threads():
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)]
    inputs = torch.randn(4, 3, 4)
    found = {}

    def step(number):
        for _ in range(10):
            loss = models[number](inputs[number]).sum()
            if number % 2:
                loss = (loss - loss).sqrt()  # here
            loss.backward()

    def search(number):
        found[number] = where(nanscan.locate(step, number))

    threads = [threading.Thread(target=search, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = ("aten.div.Tensor", marked(step), "origin", "backward", "SqrtBackward0", 0)
    assert found == {0: (), 1: expected, 2: (), 3: expected}


def test_what_other_threads_run_is_no_part_of_it():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanscan.locating() as search:
        model(torch.ones(1, 2)).sum().backward()
        events = len(search._events)

        def elsewhere():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (len(search._events), search._trace.step) == (events, 0)
    assert search.location is None


def test_beside_a_monitor():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with nanscan.watch(model, action="log") as monitor:
        assert nanscan.locate(lambda: model(torch.randn(2, 2)).sum().backward()) is None
        monitor.flush()
        assert monitor.findings == []


def test_anomaly_mode():
    x = torch.zeros(2, requires_grad=True)

    def function():
        with torch.autograd.detect_anomaly(check_nan=False):
            y = x * torch.arange(2.0)
            (torch.where(y > 0, y.sqrt(), 0) * 0).sum().backward()  # here

    location = nanscan.locate(function)
    expected = ("aten.div.Tensor", marked(function), "origin", "backward", "SqrtBackward0", 0)
    assert where(location) == expected
