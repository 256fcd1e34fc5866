"""locate finds nothing where nothing is wrong: masks, memory to be written, and clean training."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanscan
from helpers.located import garbage
from helpers.models import INF, NAN
from helpers.paths import TESTS

QUIET = []


def quiet(function):
    QUIET.append(pytest.param(function, id=function.__name__.strip("_")))
    return function


def empty(*shape):
    """Memory with NaN in it."""
    return garbage(torch.empty(*shape))


# -- masks -----------------------------------------------------------------------------------------

HIDDEN = torch.ones(4, 4).triu(1).bool()
ADDITIVE = torch.zeros(4, 4).masked_fill(HIDDEN, -INF)
SMALLEST = torch.finfo(torch.float32).min

MASKS = {
    "masked_fill": lambda s: s.masked_fill(HIDDEN, -INF),
    "masked_fill_": lambda s: s.clone().masked_fill_(HIDDEN, -INF),
    "masked_fill by a tensor": lambda s: s.masked_fill(HIDDEN, torch.tensor(-INF)),
    "full and triu": lambda s: s + torch.full((4, 4), -INF).triu(1),
    "full and triu_": lambda s: s + torch.full((4, 4), -INF).triu_(1),
    "additive, made before": lambda s: s + ADDITIVE,
    "additive, twice": lambda s: s + ADDITIVE + ADDITIVE,
    "additive, expanded": lambda s: s + ADDITIVE[None].expand(2, -1, -1),
    "additive, in half precision": lambda s: (s.half() + ADDITIVE.half()).float(),
    "where": lambda s: torch.where(HIDDEN, -INF, s),
    "where with a tensor": lambda s: torch.where(HIDDEN, torch.tensor(-INF), s),
    "log of zeros": lambda s: s + (~HIDDEN).float().log(),
    "log of a softmax's zeros": lambda s: s + (ADDITIVE.softmax(-1)).log().clamp(max=0),
    "zeros, filled": lambda s: s + torch.zeros(4, 4).masked_fill_(HIDDEN, -INF),
    "written into a slice": lambda s: _written(s, (slice(None), 0, slice(1, None))),
    "written at indices": lambda s: _written(s, (slice(None), HIDDEN)),
    "finfo.min, which overflows": lambda s: s + 2 * torch.zeros(4, 4).masked_fill(HIDDEN, SMALLEST),
    "finfo.min, twice": lambda s: s + SMALLEST * HIDDEN.float() + SMALLEST * HIDDEN.float(),
    "-1e9, which overflows in float16": lambda s: (s + HIDDEN.float() * -1e9).half().float(),
    "repeat and cat": lambda s: s + torch.cat([ADDITIVE[:2], ADDITIVE[2:]]),
    "buffer": lambda s: s + _Masked.buffer(),
}


class _Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    @staticmethod
    def buffer():
        return _Masked().mask


def _written(scores, index):
    scores = scores.clone()
    scores[index] = -INF
    return scores


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask):
    q, k, v = (torch.randn(2, 4, 8, requires_grad=True) for _ in range(3))

    def attend():
        weights = mask(q @ k.transpose(-1, -2)).softmax(-1)
        (weights @ v).sum().backward()

    assert nanscan.locate(attend) is None
    assert q.grad.isfinite().all()


@quiet
def constants():
    least = torch.tensor(INF)
    most = torch.full((2,), -INF)
    for x in torch.randn(3, 2):
        least, most = torch.minimum(least, x.min()), torch.maximum(most, x)
    return least, most, torch.randn(3).clamp(-INF, INF)


@quiet
def running_softmax():
    top, total, out = torch.full((2, 1), -INF), torch.zeros(2, 1), torch.zeros(2, 8)
    for _ in range(3):
        scores, values = torch.randn(2, 4), torch.randn(4, 8)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        fade, weights = (top - higher).exp(), (scores - higher).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + weights @ values
        top = higher
    return out / total


@quiet
def sampling_of_the_best():
    logits = torch.randn(2, 10)
    logits[logits < logits.topk(3).values[:, -1:]] = -INF
    return torch.multinomial(logits.softmax(-1), 1)


@quiet
def distribution_with_impossible_values():
    logits = torch.zeros(5).index_fill(0, torch.tensor([1]), -INF)
    choice = torch.distributions.Categorical(logits=logits)
    return choice.sample(), choice.log_prob(torch.tensor(2))


@quiet
def ctc_with_zero_infinity():
    logits = torch.randn(2, 2, 5, requires_grad=True).log_softmax(-1)
    lengths = torch.full((2,), 2), torch.full((2,), 3)
    loss = F.ctc_loss(logits, torch.ones(2, 3, dtype=torch.int64), *lengths, zero_infinity=True)
    loss.backward()
    return loss


@quiet
def attention_with_a_fully_masked_row():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    mask = torch.ones(4, 4).tril().bool()
    mask[0] = False
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


# -- what autograd absorbs -------------------------------------------------------------------------


@quiet
def norm_of_zeros():
    x = torch.zeros(3, 2, requires_grad=True)
    (x * 2).norm().backward()
    return x.grad


@quiet
def deviation_of_equal_values():
    x = torch.ones(4, requires_grad=True)
    (x * 2).std().backward()
    return x.grad


@quiet
def distances_of_equal_points():
    x = torch.zeros(3, 2, requires_grad=True)
    torch.cdist(x * 1, x * 1).sum().backward()
    return x.grad


@quiet
def normalize_of_zeros():
    x = torch.zeros(3, 2, requires_grad=True)
    F.normalize(x * 2).sum().backward()
    return x.grad


@quiet
def sinc_of_zero():
    x = torch.zeros(3, requires_grad=True)
    torch.sinc(x * 2).sum().backward()
    return x.grad


# -- memory that is written before it is read ------------------------------------------------------


@quiet
def empty_written_row_by_row():
    buffer = empty(3, 4)
    for i in range(3):
        buffer[i] = torch.randn(4)
    return buffer @ buffer.t()


@quiet
def empty_written_column_by_column():
    buffer = empty(3, 4)
    for i in range(4):
        buffer.select(1, i).copy_(torch.randn(3))
    return buffer.sum()


@quiet
def empty_written_through_views():
    buffer = empty(4, 6)
    top, bottom = buffer.split(2)
    top.view(-1)[:6].normal_()
    top.view(-1)[6:].uniform_()
    bottom.t().zero_()
    return buffer * 2


@quiet
def empty_written_by_out():
    buffer = empty(4, 2)
    torch.mul(torch.ones(2, 2), 2, out=buffer[:2])
    torch.exp(torch.ones(2, 2), out=buffer[2:])
    return buffer * 2


@quiet
def empty_of_which_a_part_is_used():
    buffer = empty(4, 2)
    buffer[:2] = 1
    return buffer[:2] * 2


@quiet
def empty_computed_with_and_dropped():
    buffer = empty(4, 2)
    buffer[:2] = 1
    return (buffer * 2)[:2]


@pytest.mark.parametrize("make", ["empty_like", "new_empty", "empty_strided"])
@pytest.mark.parametrize("write", ["copy_", "index_put", "index_copy_", "scatter_", "out"])
def test_ways_to_make_and_write_memory(make, write):
    x = torch.randn(5, 3)
    rows = torch.arange(5)

    def function():
        if make == "empty_like":
            buffer = garbage(torch.empty_like(x))
        elif make == "new_empty":
            buffer = garbage(x.new_empty(5, 3))
        else:
            buffer = garbage(torch.empty_strided((5, 3), (1, 5)))
        if write == "copy_":
            buffer.copy_(x)
        elif write == "index_put":
            buffer[rows] = x
        elif write == "index_copy_":
            buffer.index_copy_(0, rows, x)
        elif write == "scatter_":
            buffer.scatter_(0, rows[:, None].expand(-1, 3), x)
        else:
            torch.mul(x, 1, out=buffer)
        return buffer * 2

    assert nanscan.locate(function) is None


@quiet
def initialised_parameters():
    layer = torch.nn.utils.skip_init(nn.Linear, 4, 4)
    garbage(layer.weight)
    garbage(layer.bias)
    nn.init.xavier_uniform_(layer.weight)
    layer.bias.data.zero_()
    return layer(torch.randn(2, 4))


@quiet
def cache_with_slices():
    keys, values = empty(1, 2, 8, 4), empty(1, 2, 8, 4)
    for i in range(3):
        q, k, v = torch.randn(3, 1, 2, 1, 4)
        keys[:, :, i : i + 1] = k
        values[:, :, i : i + 1] = v
        q = F.scaled_dot_product_attention(q, keys[:, :, : i + 1], values[:, :, : i + 1])
    return q


@quiet
def cache_with_a_mask():
    keys, values = empty(1, 2, 8, 4), torch.zeros(1, 2, 8, 4)
    for i in range(3):
        q, k, v = torch.randn(3, 1, 2, 1, 4)
        keys.index_copy_(2, torch.tensor([i]), k)
        values.index_copy_(2, torch.tensor([i]), v)
        scores = q @ keys.transpose(-1, -2)
        q = scores.masked_fill(torch.arange(8) > i, -INF).softmax(-1) @ values
    return q


@quiet
def resized():
    buffer = torch.zeros(0)
    garbage(buffer.resize_(4)).fill_(1)
    return buffer * 2


RECEIVE = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from helpers.located import garbage
import nanscan

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def empty(*shape):
    return garbage(torch.empty(*shape))

def exchange(sent):
    buffer = empty(4)
    if rank == 0:
        dist.send(sent, 1)
        dist.recv(buffer, 1)
    else:
        dist.recv(buffer, 0)
        dist.send(sent, 0)
    late = empty(4)
    requests = [dist.irecv(late, 1 - rank), dist.isend(sent, 1 - rank)]
    for request in requests:
        request.wait()
    parts, whole, broadcast = [empty(4), empty(4)], empty(8), sent.clone()
    if rank == 1:
        broadcast = empty(4)
    dist.broadcast(broadcast, 0)
    dist.all_gather(parts, sent)
    dist.all_gather_into_tensor(whole, sent)
    total = sent * 1
    dist.all_reduce(total)
    shard = empty(4)
    dist.reduce_scatter_tensor(shard, whole)
    functional = collectives.all_gather_tensor(sent, 0, dist.group.WORLD)
    return sum([buffer, late, broadcast, *parts, whole[:4], total, shard, functional[4:]]) * 2

assert nanscan.locate(exchange, torch.ones(4)) is None
location = nanscan.locate(exchange, torch.full((4,), float("nan") if rank == 1 else 1.0))
assert location is not None
expected = ("c10d.allgather_.default" if rank else "c10d.recv_.default", "propagated")
assert (location.op, location.verdict) == expected, location
dist.destroy_process_group()
"""


@pytest.mark.host_only(reason="it runs processes of its own, on the host")
def test_what_is_received(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RECEIVE, str(rank), str(tmp_path / "store")],
            cwd=TESTS,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


# -- values that are bad already, and are dealt with -----------------------------------------------

LABELS = torch.tensor([1.0, NAN, 2.0])


@quiet
def nan_to_num():
    return torch.nan_to_num(LABELS) * 2


@quiet
def labels_selected_by_a_mask():
    prediction = torch.randn(3, requires_grad=True)
    known = ~LABELS.isnan()
    loss = (prediction[known] - LABELS[known]).square().mean()
    loss.backward()
    return loss


@quiet
def labels_replaced():
    prediction = torch.randn(3, requires_grad=True)
    loss = (prediction - torch.where(LABELS.isnan(), 0, LABELS)).square().mean()
    loss.backward()
    return loss


@quiet
def nanmean():
    return LABELS.nanmean()


# -- ordinary code ---------------------------------------------------------------------------------


@quiet
def model_in_training():
    model = nn.Sequential(
        nn.Embedding(10, 8, padding_idx=0),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(0, 10, (6, 4)) * (torch.arange(4) < 2)
        loss = F.cross_entropy(model(tokens), tokens[:, 0], label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return model(torch.randint(0, 10, (6, 4)))


@quiet
def grad_scaler():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(3, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@quiet
def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    layer(torch.randn(2, 4, 8), src_mask=mask, src_key_padding_mask=padding).sum().backward()


@quiet
def recurrent():
    out, _ = nn.LSTM(4, 4, num_layers=2)(torch.randn(3, 2, 4))
    out.sum().backward()
    out, _ = nn.GRU(4, 4, bidirectional=True)(torch.randn(3, 2, 4))
    out.sum().backward()


@quiet
def integers_empty_tensors_and_complex_ones():
    x = torch.arange(6)
    y = torch.fft.ifft(torch.fft.fft(torch.randn(8, requires_grad=True) * 2))
    y.abs().sum().backward()
    return x // 2, x % 4, torch.randn(0, 3) @ torch.randn(3, 2), torch.randn(0).sum(), y


@pytest.mark.parametrize("function", QUIET)
def test_nothing_is_found(function):
    assert nanscan.locate(function) is None
