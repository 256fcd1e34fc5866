"""Scans on a GPU are right, however large the tensor, and take no memory."""

import gc

import numpy as np
import pytest
import torch

import nanscan
from helpers import cases
from helpers.cases import Patterns, fields, name_of, real_dtype, reference
from helpers.gpu import DEVICE, DRY, FREE, Step, cuda, normal
from helpers.models import (
    INF,
    NAN,
)
from nanscan import _C

pytestmark = pytest.mark.cuda


# -- right results ---------------------------------------------------------------------------------


def samples(dtype):
    """(name, tensor) of every layout with every content."""
    for layout, (_, dtypes) in cases.LAYOUTS.items():
        if dtype in dtypes and not layout.startswith("misaligned"):
            for content, x in cases.build(dtype, layout, DEVICE).items():
                yield f"{layout}, {content}", x


@cases.each_dtype
def test_every_layout_and_content_by_every_way_to_scan(dtype):
    tensors = dict(samples(dtype))
    expected = {name: fields(reference(x)) for name, x in tensors.items()}
    found = {name: fields(nanscan.check(x)) for name, x in tensors.items()}
    assert found == expected
    found = {name: fields(nanscan.check(x, moments=True)) for name, x in tensors.items()}
    assert found == expected
    found = {name: fields(result) for name, result in nanscan.check_many(tensors).items()}
    assert found == expected

    plain = {n: x for n, x in tensors.items() if not x.is_neg() and not x.is_conj()}
    for scan in (one_by_one, at_once):
        table = _C.Table()
        for _ in plain:
            table.add_row()
        scan(table, list(plain.values()))
        rows = Step(table).rows()
        results = zip(plain, (nanscan.ScanResult(row, (), dtype) for row in rows), strict=True)
        names = [name for name in cases.FIELDS if name != "shape"]
        found = {name: {key: getattr(row, key) for key in names} for name, row in results}
        assert found == {name: {key: expected[name][key] for key in names} for name in plain}


def one_by_one(table, tensors):
    assert [table.scan(x, row) for row, x in enumerate(tensors)] == [0] * len(tensors)


def at_once(table, tensors):
    assert table.scan_many(tensors, list(range(len(tensors)))) == []


@pytest.mark.parametrize("size", [1 << 20, (1 << 24) + 7] if not DRY else [4097])
@pytest.mark.parametrize("offset", [0, 1])
@cases.each_real_dtype
def test_large_tensors_with_bad_values_anywhere(dtype, offset, size):
    """Enough for every thread of the device, several rounds each."""
    rng = np.random.default_rng(size + offset)
    patterns = Patterns(dtype)
    memory = normal(offset + size, dtype=dtype)
    clean = memory[offset:]
    low, high = clean.float().aminmax() if dtype.itemsize < 8 else clean.aminmax()
    result = nanscan.check(clean)
    assert (result.is_finite, result.numel) == (True, size)
    assert (result.min, result.max) == (low.item(), high.item())
    for count in (1, 2, 50):
        x = memory.clone()[offset:]
        places = sorted(set(rng.integers(0, size, count).tolist()))
        for place in places:
            cases.plant(x, place, patterns.nans[0])
        for result in (nanscan.check(x), nanscan.check_many([x, x])[1]):
            assert (result.nan_count, result.nonfinite_count) == (len(places), len(places))
            assert result.first_nonfinite == (places[0],)
            assert result.min >= low.item()
            assert result.max <= high.item()


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda b: b.view(-1, 4096)[:, :3000], id="chunked"),
        pytest.param(lambda b: b.view(-1, 4096)[:, 5:3001], id="chunked, odd"),
        pytest.param(lambda b: b.view(8, 64, 64, -1).permute(0, 3, 1, 2), id="channels_last"),
        pytest.param(lambda b: b.view(1024, -1).t(), id="transposed"),
        pytest.param(lambda b: b[1::3], id="stepped"),
        pytest.param(lambda b: b.view(-1, 1, 64).expand(-1, 5, -1), id="expanded"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.float8_e5m2], ids=name_of
)
def test_large_layouts(dtype, view):
    x = view(normal(1 << 20, dtype=dtype))
    cases.assert_same_as_reference(x)
    for place in (x.numel() // 3, x.numel() // 3 + 4099, -1):
        cases.plant(x, place, Patterns(dtype).bad[-1])
        cases.assert_same_as_reference(x)


@pytest.mark.parametrize("bad_every", [1, 3, 5000, None], ids=lambda n: f"bad every {n}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_results_are_bitwise_the_same_every_time(dtype, bad_every):
    x = normal((1 << 22) + 3, dtype=dtype)
    if bad_every:
        x[::bad_every] = NAN
    first = fields(nanscan.check(x))
    results = [nanscan.check(x) for _ in range(50)] + nanscan.check_many([x] * 50)
    assert all(fields(result) == first for result in results)


def test_a_cleared_bad_value_is_gone():
    """Nothing stays behind in rows and results that are used again."""
    x = normal(1000)
    table = _C.Table()
    row = table.add_row()
    for step in range(600):  # more than there are results in one piece of memory
        x[step % 1000] = NAN if step % 3 == 0 else 1.0
        table.scan(x, row)
        bad = int(step % 3 == 0)
        result = nanscan.check(x)
        assert (result.nan_count, result.first_nonfinite) == (bad, (step,) if bad else None)
        assert Step(table).rows()[row]["nan"] == bad
        x[step % 1000] = 1.0


def test_calls_of_one_row_merge():
    table = _C.Table()
    row = table.add_row()
    x, y = normal(5000), normal(70, 3)
    y[60, 2] = NAN
    for tensor in (x, y, x):
        table.scan(tensor, row)
    found = Step(table).rows()[row]
    assert (found["calls"], found["elements"], found["nan"]) == (3, 10_210, 1)
    assert (found["first_bad_call"], ~found["first_bad"]) == (2, 182)


def test_tickets_tell_the_order_of_execution():
    table = _C.Table()
    rows = [table.add_row() for _ in range(40)]
    order = torch.randperm(len(rows)).tolist()
    for row in order:
        table.scan(torch.full((3000 + row,), NAN, device=DEVICE), row)
    tickets = Step(table).rows()["ticket"]
    assert np.argsort(tickets).tolist() == order


def test_a_table_of_more_rows_than_one_allocation_holds():
    """16,384 rows do not move when there are more."""
    table = _C.Table()
    values = normal(16_500, 8)
    bad = [0, 1, 511, 512, 16_383, 16_384, 16_385, 16_499]
    values[bad, 3] = INF
    tensors = list(values.unbind())
    before = 100
    rows = [table.add_row() for _ in range(before)]
    assert table.scan_many(tensors[:before], rows) == []
    while len(rows) < len(tensors):
        rows.append(table.add_row())
    assert table.scan_many(tensors[before:], rows[before:]) == []
    for _ in range(2):
        found = Step(table).rows()
        assert (found["calls"] == 1).all()
        assert (found["elements"] == 8).all()
        assert np.flatnonzero(found["posinf"]).tolist() == bad
        assert set((~found["first_bad"][bad]).tolist()) == {3}
        assert table.scan_many(tensors, rows) == []


# -- very large ------------------------------------------------------------------------------------


@pytest.fixture
def much_memory():
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()
        if (free := cuda.mem_get_info()[0]) < FREE:
            pytest.skip(f"needs {FREE >> 30} GiB of device memory, {free >> 30} are free")
    yield
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=name_of)
def test_more_than_2_31_elements(dtype, much_memory):
    edge = 1 << (31 if not DRY else 16)
    n = edge + 4100
    patterns = Patterns(dtype)
    x = torch.full((n,), 1.5, dtype=torch.float16, device=DEVICE).to(dtype)
    result = nanscan.check(x)
    assert (result.numel, result.is_finite, result.min, result.max) == (n, True, 1.5, 1.5)
    cases.plant(x, n - 1, patterns.infs[0])
    assert nanscan.check(x).first_nonfinite == (n - 1,)
    cases.plant(x, edge + 1, patterns.nans[0])
    for result in (nanscan.check(x), nanscan.check_many([x, x])[0]):
        assert (result.nan_count, result.posinf_count) == (1, 1)
        assert result.first_nonfinite == (edge + 1,)
    turned = x.view(4, n // 4).t()
    result = nanscan.check(turned)
    assert (result.nan_count, result.posinf_count, result.numel) == (1, 1, n)
    row, column = divmod(edge + 1, n // 4)
    assert result.first_nonfinite == (column, row)
    result = nanscan.check(x.view(2, n // 2)[:, 1:])
    assert (result.nan_count, result.posinf_count, result.numel) == (1, 1, n - 2)
    assert result.first_nonfinite == (1, edge + 1 - n // 2 - 1)
    stepped = nanscan.check(x[1::2])
    assert (stepped.nan_count, stepped.posinf_count, stepped.numel) == (1, 1, n // 2)


def test_a_stride_of_0_counts_past_2_32():
    x = torch.tensor([1.0, NAN, 2.0], device=DEVICE).expand(1 << 33, 3)
    for moments in (False, True):
        result = nanscan.check(x, moments=moments)
        assert (result.numel, result.nan_count) == (3 << 33, 1 << 33)
        assert result.first_nonfinite == (0, 1)


# -- memory ----------------------------------------------------------------------------------------


def test_10_000_scans_allocate_nothing():
    x = normal(4096, dtype=torch.bfloat16)
    views = [x, x.view(64, 64).t(), x[::2]]
    table = _C.Table()
    rows = [table.add_row() for _ in views]

    def scan(times):
        for i in range(times):
            for view, row in zip(views, rows, strict=True):
                table.scan(view, row)
                nanscan.check(view)  # and let go, perhaps before it is done
            if i % 10 == 0:
                Step(table)
        cuda.synchronize()

    scan(2000)
    before = cuda.memory_stats()
    free_before = cuda.mem_get_info()[0]
    scan(10_000 if not DRY else 1000)
    after = cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.peak"):
        assert DRY or after[name] == before[name]
    assert abs(cuda.mem_get_info()[0] - free_before) <= 4 << 20


def test_closed_tables_give_their_memory_back():
    x = normal(100)

    def use():
        table = _C.Table()
        row = table.add_row()
        table.scan(x, row)
        Step(table).rows()

    for _ in range(20):
        use()
    gc.collect()
    free_before = cuda.mem_get_info()[0]
    for _ in range(200):  # 2 MiB each
        use()
    gc.collect()
    assert cuda.mem_get_info()[0] >= free_before - (16 << 20)


def test_complex_and_real_parts_agree():
    """A complex tensor counts its parts."""
    x = torch.view_as_complex(normal(3000, 2))
    x.real[5], x.imag[2999] = NAN, INF
    result = nanscan.check(x)
    assert (result.numel, result.nan_count, result.posinf_count) == (6000, 1, 1)
    assert result.first_nonfinite == (5,)
    assert real_dtype(result.dtype) == torch.float32
