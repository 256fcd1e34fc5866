"""Buffers and tensor attributes that other code spoils: named where a module reads them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import INF, NAN, SCOPES, batch, enable, infer, set_nan, sgd, train

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS, LENGTH, WIDTH = 4, 8, 4
HOW = "it was so before this forward: changed after the last one"


class Attention(nn.Module):
    """Of one head, over a cache that it holds and writes into: keys and values [N, T, C]."""

    def __init__(self, hold):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.edit = lambda x: x  # functional code before the cache
        HOLDS[hold](self)

    def forward(self, x, position):
        keys, values = self.cache() if callable(self.cache) else self.cache
        keys[:, position], values[:, position] = self.k(x), self.edit(self.v(x))
        scores = torch.einsum("nc,ntc->nt", self.q(x), keys[:, : position + 1])
        return self.o(torch.einsum("nt,ntc->nc", scores.softmax(-1), values[:, : position + 1]))


def zeros():
    return torch.zeros(REQUESTS, LENGTH, WIDTH)


def hold_buffers(attention):
    attention.register_buffer("keys", zeros())
    attention.register_buffer("values", zeros(), persistent=False)
    attention.cache = lambda: (attention.keys, attention.values)


def hold(value, read):
    def set_up(attention):
        attention.held = value()
        attention.cache = lambda: read(attention.held)

    return set_up


HOLDS = {
    "buffers": hold_buffers,
    "tuple": lambda attention: setattr(attention, "cache", (zeros(), zeros())),
    "list": lambda attention: setattr(attention, "cache", [zeros(), zeros()]),
    "dict": hold(lambda: {"k": zeros(), 1: [zeros()]}, lambda x: (x["k"], x[1][0])),
    "object": hold(lambda: SimpleNamespace(k=zeros(), v=zeros()), lambda x: (x.k, x.v)),
    "one": hold(lambda: torch.zeros(2, REQUESTS, LENGTH, WIDTH), lambda x: x.unbind(0)),
}
VALUES = {
    "buffers": "values",
    "tuple": "cache[1]",
    "list": "cache[1]",
    "dict": "held[1][0]",
    "object": "held.v",
    "one": "held",
}


class Decoder(nn.Module):
    def __init__(self, hold="tuple", layers=3):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "attn": Attention(hold)})
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens, position):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer["attn"](layer["norm"](x), position)
        return self.head(x)

    def caches(self, layer):
        cache = self.layers[layer]["attn"].cache
        return cache() if callable(cache) else cache

    def values(self, layer):
        return self.caches(layer)[1]


def serve(model, steps, before=lambda step: None):
    """Decodes; `before` is code of the server."""
    tokens = torch.arange(REQUESTS)
    with torch.no_grad():
        for step in range(steps):
            before(step)
            tokens = model(tokens, step).nan_to_num().argmax(-1)


def watch(scope, model, **options):
    told = []

    def act(finding):
        if finding.is_fault:
            told.append((finding.step, str(finding.site), finding.verdict))

    return enable(scope, model, action=act, **options), told


# -- what is named ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", HOLDS)
@SCOPES
def test_a_cache_that_the_server_spoils(scope, hold):
    model = Decoder(hold)
    monitor, told = watch(scope, model)

    def before(step):
        if step == 3:
            model.values(1)[2, 0] = NAN
        if step == 6:
            [cache.nan_to_num_() for layer in range(3) for cache in model.caches(layer)]

    serve(model, 8, before)
    site = f"layers.1.attn.{VALUES[hold]} buffer"
    assert told == [(3, site, "origin")]
    first, second = monitor.findings[:2]
    assert (first.how, first.stats.nan_count) == (HOW, WIDTH)
    assert (str(second.site), second.verdict) == ("layers.1.attn.o input[0]", "propagated")
    assert {f.verdict for f in monitor.findings[1:-1]} == {"propagated"}
    assert (monitor.findings[-1].step, monitor.findings[-1].verdict) == (6, "recovered")
    assert monitor.healthy is True  # no state_dict holds it, or it is fine again


@SCOPES
def test_requests_that_go_bad_one_after_another(scope):
    model = Decoder()
    monitor, told = watch(scope, model)

    def before(step):
        layer, request = {2: (0, 0), 4: (2, 1), 5: (0, 2)}.get(step, (0, None))
        if request is not None:
            model.values(layer)[request, 0] = NAN

    serve(model, 7, before)
    assert told == [
        (2, "layers.0.attn.cache[1] buffer", "origin"),
        (4, "layers.2.attn.cache[1] buffer", "origin"),
        (5, "layers.0.attn.cache[1] buffer", "origin"),
    ]
    how = [f.how for f in monitor.findings if f.news]
    assert how == [
        HOW,
        f"{HOW}, now also at index 1 of dimension 0",
        f"{HOW}, now also at index 2 of dimension 0",
    ]


@SCOPES
def test_a_fault_elsewhere_while_a_cache_is_bad(scope):
    model = Decoder()
    _, told = watch(scope, model)

    def spoil(x):
        x = x.clone()
        x[3] /= 0
        return x

    def before(step):
        if step == 2:
            model.values(0)[0, 0] = NAN
        if step == 5:
            model.layers[2]["attn"].edit = spoil

    serve(model, 7, before)
    assert told == [
        (2, "layers.0.attn.cache[1] buffer", "origin"),
        (5, "layers.2.attn.o input[0]", "origin"),
    ]


@SCOPES
def test_a_cache_that_is_replaced_by_a_bad_one(scope):
    model = Decoder("list")
    _, told = watch(scope, model)

    def before(step):
        if step == 2:
            cache = model.layers[1]["attn"].cache
            cache[1] = set_nan(cache[1])

    serve(model, 4, before)
    assert told == [(2, "layers.1.attn.cache[1] buffer", "origin")]


@SCOPES
def test_a_cache_that_two_layers_share(scope):
    model = Decoder()
    model.layers[1]["attn"].cache = model.layers[0]["attn"].cache
    _, told = watch(scope, model)
    serve(model, 3, lambda step: step == 2 and model.values(0)[:, 0].fill_(NAN))
    assert told == [(2, "layers.0.attn.cache[1] buffer", "origin")]


@SCOPES
def test_a_cache_that_is_bad_from_the_start(scope):
    model = Decoder()
    model.values(0).fill_(NAN)
    monitor, told = watch(scope, model)
    with torch.no_grad():
        model(torch.arange(REQUESTS), 2)  # reads what was not written
    assert told == [(0, "layers.0.attn.cache[1] buffer", "origin")]
    assert monitor.findings[0].how == "it was so before its model first ran"


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("is_training", [True, False])
@SCOPES
def test_a_buffer_that_other_code_spoils(scope, is_training):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scales(), nn.Linear(WIDTH, WIDTH))
    monitor, told = watch(scope, model)
    optimizer = sgd(model) if is_training else None

    def step(seed):
        train(model, optimizer, [batch(seed)]) if is_training else infer(model, batch(seed))

    step(0)
    model[1].scale[1] = NAN
    step(1)
    assert told[0] == (1, "1.scale buffer", "origin")
    first, second = monitor.findings[:2]
    assert (first.how, first.stats.first_nonfinite) == (HOW, (1,))
    assert (str(second.site), second.verdict) == ("1 output", "propagated")
    assert second.causes[0].title == "1.scale was bad before 1 ran"
    assert monitor.healthy is False


@SCOPES
def test_running_statistics_that_other_code_spoils(scope):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()
    monitor, told = watch(scope, model)
    infer(model, batch())
    model[1].running_var[2] = NAN
    infer(model, batch(1), batch(2))
    assert told == [(1, "1.running_var buffer", "origin")]
    assert monitor.findings[0].how == "changed between two steps, by no optimizer"
    assert monitor.healthy is False
    model[1].reset_running_stats()
    infer(model, batch(3))
    assert monitor.findings[-1].verdict == "recovered"
    assert monitor.healthy is True


# -- what must not be named ------------------------------------------------------------------------


def not_blamed(monitor):
    return not any(f.site.kind == "buffer" for f in monitor.findings)


@pytest.mark.parametrize("is_touched", [False, True])
@pytest.mark.parametrize("hold", HOLDS)
@SCOPES
def test_what_a_module_makes_and_keeps_itself(scope, hold, is_touched):
    """Also if other code has changed the same cache just before, harmlessly."""
    model = Decoder(hold)
    monitor, told = watch(scope, model)

    def before(step):
        if step == 3:
            model.layers[1]["attn"].edit = lambda x: x / 0
        if is_touched:
            model.values(1)[:, -1] = 0

    serve(model, 6, before)
    assert told == [(3, "layers.1.attn.o input[0]", "origin")]
    assert not_blamed(monitor)


@SCOPES
def test_bad_values_that_only_pass_through_caches(scope):
    model = Decoder()
    monitor, told = watch(scope, model)

    def before(step):
        if step == 2:
            model.embedding.weight.data[:] = NAN
        [model.values(layer)[:, -1].zero_() for layer in range(3)]

    serve(model, 5, before)
    assert told == [(2, "embedding.weight param", "origin")]
    assert not_blamed(monitor)


@SCOPES
def test_a_new_request_beside_a_bad_one_makes_its_own_fault(scope):
    """Its slot was emptied just before, in a cache that holds what the bad request left."""
    model = Decoder()
    _, told = watch(scope, model)

    def spoil(x):
        x = x.clone()
        x[3] /= 0
        return x

    def before(step):
        if step == 1:
            model.values(0)[0, 0] = NAN
        if step == 5:
            model.values(2)[3] = 0
            model.layers[2]["attn"].edit = spoil

    serve(model, 7, before)
    assert told == [
        (1, "layers.0.attn.cache[1] buffer", "origin"),
        (5, "layers.2.attn.o input[0]", "origin"),
    ]


class Grows(nn.Module):
    """Puts a new tensor in the place of its cache at each call."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.past = torch.zeros(0, WIDTH)
        self.divisor = 1

    def forward(self, x):
        self.past = torch.cat([self.past, self.fc(x) / self.divisor])
        return self.past.sum(0)


@SCOPES
def test_a_cache_that_a_module_replaces(scope):
    model = nn.Sequential(Grows(), nn.Linear(WIDTH, WIDTH))
    monitor, told = watch(scope, model)
    infer(model, batch(), batch(1))
    model[0].divisor = 0
    infer(model, batch(2), batch(3))
    assert told == [(2, "0 output", "origin")]
    assert not_blamed(monitor)


@SCOPES
def test_what_nobody_reads_is_silent(scope):
    model = Decoder()
    model.layers[0]["attn"].observed = [torch.full((2,), INF), torch.full((2,), -INF)]
    model.register_buffer("room", torch.full((4,), NAN))
    model.layers[1]["attn"].cache = (zeros(), torch.full_like(zeros(), NAN))
    model.layers[2]["attn"].shadow = {"o": torch.zeros(4)}
    monitor, _ = watch(scope, model)

    def before(step):
        if step == 2:
            model.layers[2]["attn"].shadow["o"].fill_(NAN)

    serve(model, 5, before)
    assert monitor.findings == []
    assert monitor.healthy is True


@SCOPES
def test_an_average_of_a_spoiled_parameter_takes_no_blame(scope):
    class Averages(nn.Linear):
        shadow = None

    model = nn.Sequential(Averages(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].shadow = [model[0].weight.detach().clone()]
    monitor, told = watch(scope, model)
    optimizer = sgd(model)
    for seed in range(4):
        if seed == 2:
            model[0].weight.data[0, 0] = NAN
        model[0].shadow[0].lerp_(model[0].weight.detach(), 0.1)
        train(model, optimizer, [batch(seed)])
    assert told == [(2, "0.weight param", "origin")]
    assert not_blamed(monitor)


@SCOPES
def test_a_forward_in_another_thread_is_no_other_code(scope):
    """It spoils the cache while a forward runs, and amid another one's."""
    model = Decoder(layers=1)
    monitor, _ = watch(scope, model)
    serve(model, 2)
    attention, wait, go = model.layers[0]["attn"], threading.Event(), threading.Event()

    def pause(x):
        wait.set()
        go.wait(10)
        return x / 0

    attention.edit = pause
    thread = threading.Thread(target=infer, args=(Tokens(model), torch.arange(REQUESTS)))
    thread.start()
    wait.wait(10)
    attention.edit = lambda x: x
    go.set()
    thread.join()
    serve(model, 5)
    assert not_blamed(monitor)


class Tokens(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = [model]

    def forward(self, x):
        return self.model[0](x, 2)


def test_a_forward_that_raises_and_one_that_is_not_watched_are_no_other_code():
    model = Decoder()
    monitor, told = watch("model", model)
    serve(model, 2)

    def fail(x):
        raise ValueError

    model.layers[0]["attn"].edit = lambda x: x / 0
    model.layers[1]["attn"].edit = fail
    with pytest.raises(ValueError):
        serve(model, 1)
    model.layers[0]["attn"].edit = model.layers[1]["attn"].edit = lambda x: x
    serve(model, 3)
    monitor.pause()
    model.layers[2]["attn"].edit = lambda x: x / 0
    serve(model, 1)
    model.layers[2]["attn"].edit = lambda x: x
    monitor.resume()
    serve(model, 2)
    assert not_blamed(monitor)
    assert not any("changed after" in f.how for f in monitor.findings), told


def test_inference_tensors_are_left_alone():
    """Torch counts no versions of them."""
    model = Decoder(layers=1)
    with torch.inference_mode():
        model.layers[0]["attn"].cache = (zeros(), zeros())
        monitor, told = watch("model", model)
        for step in range(4):
            if step == 2:
                model.values(0)[0, 0] = NAN
            model(torch.arange(REQUESTS), step)
    assert told == [(2, "layers.0.attn.o input[0]", "origin")]
    assert not_blamed(monitor)


def test_what_changes_all_the_time_is_scanned_seldom(monkeypatch):
    from nanscan._collect import held_tensors

    scans = []
    scan = held_tensors._scan
    monkeypatch.setattr(held_tensors, "_scan", lambda x: scans.append(1) or scan(x))
    model = Decoder(layers=1)
    model.shadow = torch.zeros(4)
    nanscan.enable(model)
    serve(model, 4)
    scans.clear()
    for _ in range(32):
        serve(model, 8, lambda step: model.shadow.add_(1))
    assert 8 <= len(scans) <= 18


# -- objects that callers hand in ------------------------------------------------------------------


class Cache:
    """As those of transformers: grows, with new tensors for each token."""

    def __init__(self, layers):
        self.layers = [SimpleNamespace(keys=None, values=None) for _ in range(layers)]

    def update(self, index, key, value):
        layer = self.layers[index]
        for name, x in (("keys", key[:, None]), ("values", value[:, None])):
            old = getattr(layer, name)
            setattr(layer, name, x if old is None else torch.cat([old, x], 1))
        return layer.keys, layer.values


class CachedAttention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.edit = lambda x: x  # functional code before the cache

    def forward(self, x, cache):
        keys, values = cache.update(self.index, self.k(x), self.edit(self.v(x)))
        weights = torch.einsum("nc,ntc->nt", self.q(x), keys).softmax(-1)
        return self.o(torch.einsum("nt,ntc->nc", weights, values))


class CachedDecoder(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(map(CachedAttention, range(layers)))

    def forward(self, tokens, cache):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, cache)
        return x


def serve_with(model, cache, steps, before=lambda step: None, *, by_keyword=True):
    with torch.no_grad():
        for step in range(steps):
            before(step)
            if by_keyword:
                model(torch.arange(REQUESTS), cache=cache)
            else:
                model(torch.arange(REQUESTS), cache)


@pytest.mark.parametrize("by_keyword", [True, False])
@SCOPES
def test_a_handed_in_cache_that_the_server_spoils(scope, by_keyword):
    model, cache = CachedDecoder(), Cache(3)
    monitor, told = watch(scope, model)

    def before(step):
        if step == 3:
            cache.layers[1].values[2, 0] = NAN

    serve_with(model, cache, 6, before, by_keyword=by_keyword)
    name = "cache" if by_keyword else "input[1]"
    assert told == [(3, f"{name}.layers[1].values buffer", "origin")]
    assert monitor.findings[0].how == HOW
    assert (str(monitor.findings[1].site), monitor.findings[1].verdict) == (
        "layers.1.o input[0]",
        "propagated",
    )


@SCOPES
def test_a_new_cache_that_is_bad_when_it_is_handed_in(scope):
    model = CachedDecoder()
    _, told = watch(scope, model)
    serve_with(model, Cache(3), 3)
    copied = Cache(3)
    for layer in copied.layers:  # of a prefix that requests share
        layer.keys, layer.values = torch.zeros(2, REQUESTS, 2, WIDTH).unbind(0)
    copied.layers[0].values[1, 1, 2] = NAN
    serve_with(model, copied, 2)
    assert told == [(3, "cache.layers[0].values buffer", "origin")]


@SCOPES
def test_what_a_layer_makes_goes_into_a_handed_in_cache(scope):
    model, cache = CachedDecoder(), Cache(3)
    monitor, told = watch(scope, model)

    def before(step):
        model.layers[1].edit = (lambda x: x / 0) if step == 3 else (lambda x: x)
        if step == 3:
            cache.layers[1].keys[:, 0] *= 1  # other code touches it, harmlessly

    serve_with(model, cache, 6, before)
    assert told == [(3, "layers.1.o input[0]", "origin")]
    assert not_blamed(monitor)


class Batch:
    """As those of PyTorch Geometric: no container that is scanned as an argument."""

    def __init__(self, x):
        self.x = x


class OfBatches(nn.Module):
    def __init__(self, edit=lambda x: x):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.edit = edit

    def forward(self, batch):
        return self.fc(self.edit(batch.x))


@SCOPES
def test_a_batch_in_an_object(scope):
    model = OfBatches()
    _, told = watch(scope, model)
    for step in range(400):
        with torch.no_grad():
            model(Batch(set_nan(batch()) if step in (5, 390) else batch()))
    assert told == [(step, "input[0].x buffer", "origin") for step in (5, 390)]


@SCOPES
def test_a_good_batch_in_an_object(scope):
    model = OfBatches(lambda x: x / 0)
    monitor, told = watch(scope, model)
    model(Batch(batch()))
    assert told == [(0, "fc input[0]", "origin")]
    assert not_blamed(monitor)


def test_a_healthy_cache_is_not_scanned_again(monkeypatch):
    from nanscan._collect import held_tensors

    scans = []
    scan = held_tensors._scan
    monkeypatch.setattr(held_tensors, "_scan", lambda x: scans.append(1) or scan(x))
    model = CachedDecoder()
    nanscan.enable(model)
    serve_with(model, Cache(3), 20)
    assert scans == []
