"""Two ranks under DDP and FSDP2, plain and compiled: losses keep their bits, calls are seen."""

import contextlib

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanscan

WORLD = 2
STEPS = 3


def _net():
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), block, nn.Linear(8, 2))


def _ddp(model):
    return DistributedDataParallel(model)


def _compiled_ddp(model):
    return torch.compile(DistributedDataParallel(model), backend="aot_eager")


def _sharded(model):
    fully_shard(model[2])
    return fully_shard(model)


def _sharded_with_compiled_block(model):
    model[2].compile(backend="eager")
    return _sharded(model)


WAYS = {way.__name__: way for way in (_ddp, _compiled_ddp, _sharded, _sharded_with_compiled_block)}


class Poison(nn.Module):
    """Makes a NaN in the forward of one rank in one step."""

    def __init__(self, rank, step):
        super().__init__()
        self.rank, self.step, self.calls = rank, step, 0

    def forward(self, x):
        self.calls += 1
        bad = distributed.get_rank() == self.rank and self.calls == self.step + 1
        return x / 0 * 0 if bad else x


def _losses(model, rank, steps=STEPS):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(steps):
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _train(way, rank, *, watched):
    """The losses of a few steps, and the modules of whose calls a monitor saw nothing."""
    torch._dynamo.reset()
    model = WAYS[way](_net())
    if not watched:
        return list(_losses(model, rank)), None
    with contextlib.closing(nanscan.enable(model)) as monitor:
        losses = list(_losses(model, rank))
        assert monitor.healthy
        return losses, monitor.coverage().not_called


def _fault(rank):
    """What a monitor says at each rank of a NaN that rank 1 makes."""
    model = _net()
    model[2].append(Poison(rank=1, step=1))
    sharded = _sharded(model)
    with contextlib.closing(nanscan.enable(sharded, action="log")) as monitor:
        list(_losses(sharded, rank))
        monitor.flush()
        return [(each.rank, each.step, str(each.site)) for each in monitor.findings]


def _work(rank, folder):
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    told = {way: [_train(way, rank, watched=watched) for watched in (False, True)] for way in WAYS}
    told["fault"] = _fault(rank)
    torch.save(told, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(_work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", WAYS)
def test_losses_keep_their_bits(told, way):
    for rank in range(WORLD):
        (without, _), (watched, not_called) = told[rank][way]
        assert watched == without
        assert len(without) == STEPS
        assert not not_called


def test_a_fault_names_its_rank(told):
    rank, step, site = told[1]["fault"][0]
    assert (rank, step, site) == (1, 1, "2.2 output")
    # The other rank gets the NaN by the sum of gradients only.
    rank, step, site = told[0]["fault"][0]
    assert (rank, step) == (0, 1)
    assert "grad" in site
