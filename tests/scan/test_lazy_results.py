"""Numbers are read late: whatever happens after a scan, a result shows what the scan found."""

import copy
import gc
import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import nanscan
from helpers import cases
from helpers.models import INF, NAN
from nanscan import _C, ScanResult, Site
from nanscan._data.row import ROW
from nanscan._scan import reference

MIXED = [[1.0, -3.0, NAN, INF], [-INF, 0.0, -INF, 2.0]]


@pytest.fixture
def mixed():
    return torch.tensor(MIXED)


def test_the_tensor_may_change_and_go(mixed):
    expected = repr(nanscan.check(mixed.clone(), moments=True))
    result = nanscan.check(mixed, moments=True)
    mixed.zero_()
    mixed.untyped_storage().resize_(0)
    del mixed
    assert repr(result) == expected


@pytest.mark.parametrize("form", [lambda rows: rows[1], lambda rows: rows[1:2].reshape(())])
def test_the_memory_of_a_row_may_be_used_again(form, mixed):
    rows = np.zeros(3, ROW)
    rows[1] = reference.scan(mixed, moments=True)
    result = ScanResult(form(rows), (2, 4), torch.float32, moments=True)
    rows[:] = np.frombuffer(_C.scan_once(torch.ones(7), False), ROW)
    del rows
    assert repr(result) == repr(nanscan.check(mixed, moments=True))


@pytest.mark.usefixtures("seeded_and_without_trace")
def test_findings_show_their_step_after_the_table_and_its_history_were_used_again():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    monitor = nanscan.enable(model, history=2, action="log")
    model(torch.ones(1, 2))
    model(torch.full((1, 2), NAN))
    monitor.flush()
    finding = monitor.findings[0]
    for _ in range(5):
        model(torch.zeros(1, 2))
    monitor.flush()
    kept = monitor.history(Site("0", "output"))
    monitor.close()
    assert finding.stats.nan_count == finding.stats.numel == 2
    assert finding.history["step"].tolist() == [0, 1]
    assert finding.history["nan"].tolist() == [0, 2]
    assert kept["nan"].tolist() == [0, 0]


@pytest.mark.usefixtures("seeded_and_without_trace")
def test_a_history_has_all_of_its_arrays_and_keeps_what_was_read():
    model = nn.Sequential(nn.Linear(2, 2))
    monitor = nanscan.enable(model, action="log")
    model(torch.full((1, 2), NAN))
    monitor.flush()
    history = monitor.findings[0].history
    names = ["step", "calls", "nan", "posinf", "neginf", "min", "max", "absmax"]
    assert list(history) == names
    assert len(history) == len(names)
    assert history["absmax"] is history["absmax"]
    assert repr(history) == repr(dict(history))
    with pytest.raises(KeyError):
        history["mean"]
    restored = pickle.loads(pickle.dumps(history))
    for name in names:
        np.testing.assert_array_equal(restored[name], history[name])


def by_pickle(protocol):
    return lambda x: pickle.loads(pickle.dumps(x, protocol))


COPIES = {f"pickle {p}": by_pickle(p) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)}


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("how", [*COPIES.values(), copy.copy, copy.deepcopy])
def test_a_copy_shows_the_same(how, moments, mixed):
    result = nanscan.check(mixed, moments=moments)
    copied = how(result)
    assert type(copied) is ScanResult
    assert repr(copied) == repr(result)
    assert (copied.shape, copied.dtype) == (result.shape, result.dtype)
    assert copied != result  # compared by identity, as ever
    assert len({copied, result, result}) == 2


def test_a_result_cannot_be_changed(mixed):
    result = nanscan.check(mixed)
    for name in ("shape", "dtype", "numel", "nan_count", "calls", "min", "is_finite", "other"):
        with pytest.raises(AttributeError):
            setattr(result, name, 3)


@pytest.mark.parametrize("row", [b"", bytes(127), bytes(129), np.zeros(2, ROW)])
def test_what_is_no_row_is_refused(row):
    with pytest.raises(ValueError, match="expected the 128 bytes of a row"):
        ScanResult(row, (), torch.float32)
    with pytest.raises(TypeError):
        ScanResult(3, (), torch.float32)


@cases.each_dtype
def test_shape_and_dtype_are_those_of_the_tensor(dtype):
    for shape in [(), (0,), (1, 2, 0), (2, 1, 3), (300, 2)]:
        x = torch.zeros(shape, dtype=dtype)
        for result in (nanscan.check(x), nanscan.check_many([x])[0]):
            assert (result.shape, result.dtype) == (shape, dtype)
            assert type(result.shape) is tuple


def test_threads_read_one_result():
    x = torch.zeros(1 << 20)
    x[7] = NAN
    results = nanscan.check_many([x] * 20)
    seen, barrier = [], threading.Barrier(8)

    def read():
        barrier.wait()
        seen.extend([repr(result) for result in results])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 160
    assert set(seen) == {repr(nanscan.check(x))}


# -- trees -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    """A registered node, as outputs of models are."""

    loss: Any
    hidden: Any


pytree.register_dataclass(Output)


def eager(tree):
    """The same by torch's own walk."""
    return pytree.tree_map(lambda x: None if x is None else nanscan.check(x), tree)


def shown(tree):
    leaves, spec = pytree.tree_flatten(tree)
    return [repr(leaf) for leaf in leaves], spec


class Plain(torch.Tensor):
    """A subclass over its own memory."""


X, Y = torch.tensor(MIXED), torch.zeros(3, dtype=torch.float16)
TREES = {
    "leaf": X,
    "none": None,
    "flat": [X, Y, None],
    "empty": [[], (), {}, OrderedDict(), Pair(None, [])],
    "parameters": dict(nn.Linear(2, 3).named_parameters()),
    "state": nn.Linear(2, 3).state_dict(),
    "order of keys": {"z": X, "a": Y, 3: X, (1, 2): {"y": Y, "b": X}},
    "named": Pair(X, (Pair([Y], Pair(Y, {"k": X})), None)),
    "ordered": (OrderedDict(z=X, a=[Y]), [defaultdict(list, k=[X])], deque([X, (Y,)], maxlen=5)),
    "dataclass": Output(X, (Y, Output([X], {"k": Pair(Y, Output(None, X))}))),
    "subclass": [X.to_sparse(), {"p": nn.Parameter(X)}, X.as_subclass(Plain)],
    "lazy bit": (torch._neg_view(X), torch.ones(2, dtype=torch.complex64).conj()),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_keeps_its_structure(name):
    tree = TREES[name]
    before = shown(tree)
    result = nanscan.check_many(tree)
    assert shown(result) == shown(eager(tree))
    assert type(result) is type(eager(tree))
    assert shown(tree) == before  # the tree itself is left alone


def test_a_list_that_holds_itself_is_refused():
    tree = [X]
    tree.append(tree)
    with pytest.raises(RecursionError):
        nanscan.check_many(tree)
    node = OrderedDict(x=X)
    node["self"] = [node]
    with pytest.raises(RecursionError):
        nanscan.check_many(node)


def test_what_a_node_raises_is_raised():
    class Broken(dict):
        pass

    def make(results, _):
        raise ValueError("made of " + str(len(results)))

    pytree.register_pytree_node(Broken, lambda node: (list(node.values()), None), make)
    with pytest.raises(ValueError, match="made of 2"):
        nanscan.check_many([{"k": Broken(a=X, b=Y)}])


def test_another_thread_empties_the_tree_meanwhile():
    """Large scans let other threads run; what they remove is scanned all the same."""
    for _ in range(20):
        x = torch.zeros(3 << 18)
        x[-1] = NAN
        inner = [x.clone() for _ in range(4)]
        tree = {"a": inner, "b": (Pair(inner, {"c": inner}),)}
        del x
        emptier = threading.Thread(
            target=lambda inner=inner, tree=tree: (inner.clear(), tree.clear())
        )
        emptier.start()
        results = pytree.tree_leaves(nanscan.check_many(tree))
        emptier.join()
        assert all(result.nan_count == 1 for result in results)


def test_memory_does_not_grow():
    tree = Output([X, {"k": (Y, None)}], Pair(X, OrderedDict(a=Y)))
    wrong = Output([X, {"k": (Y, None)}], Pair(X, OrderedDict(a=3)))

    def use():
        for result in pytree.tree_leaves(nanscan.check_many(tree, moments=True))[:2]:
            repr(pickle.loads(pickle.dumps(result)))
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            nanscan.check_many(wrong)
        with pytest.raises(ValueError, match="128 bytes"):
            ScanResult(b"", (), torch.float32)
        nanscan.check(X)

    def grown():
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(300):
            use()
        gc.collect()
        return sys.getallocatedblocks() - before

    def references():
        return [sys.getrefcount(x) for x in (torch.float32, X, ScanResult)]

    grown()
    before = references()
    # What leaks grows in each round; what Python keeps for later use grows in the first ones.
    assert min(grown() for _ in range(4)) < 30
    assert references() == before
