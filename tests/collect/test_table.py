"""_C.Table: rows that merge, visits that are not repeated, snapshots that reset."""

import gc
import weakref

import numpy as np
import pytest
import torch

import nanscan
from helpers import cases
from helpers.cases import take_snapshot
from helpers.models import INF, NAN
from nanscan import _C
from nanscan._data.row import ROW
from nanscan._scan import reference as oracle


@pytest.fixture
def table():
    table = _C.Table()
    for _ in range(4):
        table.add_row()
    return table


def test_rows_are_numbered_as_they_are_added(table):
    assert len(table) == 4
    assert [table.add_row() for _ in range(3)] == [4, 5, 6]
    assert len(table) == 7


@pytest.mark.host_only(reason="the tickets of checks on a CUDA device count on")
@cases.each_dtype
def test_a_scanned_row_is_the_row_of_check(table, dtype):
    x = cases.fill(
        cases.buffer(dtype, cases.Content(), 500), cases.Content(planted={0.4: 1, 1.0: 1})
    )
    cases.plant(x, 200, cases.Patterns(cases.real_dtype(dtype)).bad[-1])
    assert table.scan(x, 2) == 0
    rows = take_snapshot(table).rows
    assert rows[2].tobytes() == _C.scan_once(x, False)
    assert rows[0].tobytes() == rows[3].tobytes() == bytes(ROW.itemsize)


def test_calls_merge(table):
    for values in ([1.0, -2.0], [3.0, INF, NAN], [NAN, -7.0, -INF], [9.0]):
        assert table.scan(torch.tensor(values), 0) == 0
    row = take_snapshot(table).rows[0]
    result = nanscan.ScanResult(row, (3,), torch.float32)
    assert (result.calls, result.numel) == (4, 9)
    assert (result.nan_count, result.posinf_count, result.neginf_count) == (2, 1, 1)
    assert (result.min, result.max) == (-7.0, 9.0)
    assert row["first_bad_call"] == 2
    assert result.first_nonfinite == (1,)
    assert row["ticket"] == 1


@pytest.mark.host_only(reason="devices do not count the first bad call by itself")
def test_the_first_bad_call_is_counted_by_itself(table):
    for values in ([1.0], [3.0, INF, NAN], [NAN], [-INF, 1.0, 2.0]):
        table.scan(torch.tensor(values), 0)
    assert table.bad_counts(0) == (3, 1, 1, 0)
    assert table.bad_counts(1) is None
    take_snapshot(table)
    table.scan(torch.tensor([3.0, 1.0, 2.0]), 0)
    assert table.bad_counts(0) is None  # it is fine now
    table.scan(torch.tensor([3.0, NAN, 2.0]), 0)
    assert table.bad_counts(0) == (3, 1, 0, 0)


@pytest.mark.host_only(reason="what is merged is on the host in any case")
def test_rows_of_two_parts_of_a_step_merge(table):
    parts = []
    for values in ([[1.0, NAN], None], [[INF, 5.0, 2.0], [7.0]]):
        for row, held in enumerate(values):
            if held is not None:
                table.scan(torch.tensor(held), row)
        parts.append(take_snapshot(table).rows.copy())
    first, second = parts
    _C.merge_rows(second.view(np.uint8), first.view(np.uint8))
    result = nanscan.ScanResult(first[0], (2,), torch.float32)
    assert (result.calls, result.numel, result.nan_count, result.posinf_count) == (2, 5, 1, 1)
    assert (result.min, result.max, result.first_nonfinite) == (1.0, 5.0, (1,))
    assert first["calls"].tolist() == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="as many whole rows"):
        _C.merge_rows(second[:1].view(np.uint8), first.view(np.uint8))


def test_tickets_give_the_order_in_which_rows_went_bad(table):
    good, bad = torch.ones(3), torch.tensor([NAN])
    for tensor, row in ((good, 0), (bad, 3), (good, 1), (bad, 1), (bad, 3), (bad, 0), (good, 2)):
        table.scan(tensor, row)
    assert take_snapshot(table).rows["ticket"].tolist() == [3, 2, 0, 1]


@pytest.mark.host_only(reason="snapshots of CUDA devices number their tickets from 1")
def test_tickets_go_on_after_a_snapshot(table):
    table.scan(torch.tensor([NAN]), 0)
    first = take_snapshot(table).rows["ticket"][0]
    table.scan(torch.tensor([NAN]), 0)
    assert take_snapshot(table).rows["ticket"][0] > first > 0


def test_order_is_that_of_first_visits(table):
    tensors = [torch.ones(i + 1) for i in range(3)]
    table.visit(tensors[0], 2)
    table.scan(tensors[1], 0)
    table.visit(tensors[0], 1)
    table.visit(tensors[2], 2)
    table.visit(tensors[2], 3)
    assert [table.order(row) for row in range(4)] == [2, 0, 1, 0]
    assert table.visits == 2
    assert take_snapshot(table).order == [2, 0, 1, 0]
    assert table.visits == table.order(0) == 0
    table.visit(tensors[0], 3)
    assert take_snapshot(table).order == [0, 0, 0, 1]


def test_snapshot_resets_rows_to_zero_bytes(table):
    table.scan(torch.tensor([1.0, NAN]), 1)
    assert take_snapshot(table).rows[1]["calls"] == 1
    again = take_snapshot(table)
    assert again.rows.tobytes() == bytes(4 * ROW.itemsize)
    assert again.order == [0, 0, 0, 0]


def test_visit_scans_a_tensor_once_a_step(table):
    x = torch.tensor([1.0, NAN])
    assert table.visit(x, 1) == 1
    assert table.visit(x, 2) == 1
    assert table.visit(x, -1) == 1
    assert take_snapshot(table).rows["calls"].tolist() == [0, 1, 0, 0]
    assert table.visit(x, 2) == 2
    assert take_snapshot(table).rows["calls"].tolist() == [0, 0, 1, 0]


def test_visit_without_a_row_only_looks(table):
    x = torch.ones(2)
    assert table.visit(x, -1) == _C.NEEDS_ROW
    assert take_snapshot(table).rows["calls"].sum() == 0
    assert table.visit(x, 0) == 0


def test_visit_scans_again_after_a_change_in_place(table):
    x = torch.ones(3)
    assert table.visit(x, 0) == 0
    x[1] = NAN
    assert table.visit(x, 1) == 1
    assert table.visit(x, 2) == 1
    x.mul_(2)
    assert table.visit(x, -1) == _C.NEEDS_ROW
    assert take_snapshot(table).rows["nan"].tolist() == [0, 1, 0, 0]


def test_visit_sees_a_change_through_a_view(table):
    base = torch.ones(4)
    view = base[:2]
    assert table.visit(view, 0) == 0
    base.fill_(INF)
    assert table.visit(view, 1) == 1
    assert take_snapshot(table).rows["posinf"].tolist() == [0, 2, 0, 0]


def test_visit_tells_apart_objects_over_one_memory(table):
    x = torch.ones(3)
    assert table.visit(x, 0) == 0
    assert table.visit(x[:2], 1) == 1
    assert table.visit(x.detach(), 2) == 2


def test_visit_is_not_fooled_by_an_address_used_again(table):
    for attempt in range(10_000):
        x = torch.zeros(2)
        address = id(x)
        assert table.visit(x, 0) == 0, attempt
        del x
        y = torch.full((2,), NAN)
        if id(y) == address:
            break
        take_snapshot(table)
    assert id(y) == address, "this Python never used an address again, so nothing was tested"
    assert table.visit(y, 1) == 1
    rows = take_snapshot(table).rows
    assert (rows[0]["nan"], rows[1]["nan"]) == (0, 2)


def test_a_visited_tensor_dies_as_always(table):
    x = torch.ones(3)
    table.visit(x, 0)
    table.scan(x, 1)
    alive = weakref.ref(x)
    del x
    assert alive() is None


def test_a_table_that_dies_drops_its_weak_references():
    table = _C.Table()
    table.add_row()
    x = torch.ones(3)
    assert weakref.getweakrefcount(x) == 0
    table.visit(x, 0)
    assert weakref.getweakrefcount(x) == 1
    del table
    gc.collect()
    assert weakref.getweakrefcount(x) == 0


def test_a_bound_function_keeps_its_table_alive():
    table = _C.Table()
    row = table.add_row()
    visit, scan = table.visit, table.scan
    del table
    gc.collect()
    assert visit(torch.ones(2), row) == scan(torch.ones(2), row) == row == 0


def test_inference_tensors_have_no_version_and_are_scanned_each_time(table):
    with torch.inference_mode():
        x = torch.ones(3)
    assert [table.visit(x, 0), table.visit(x, 1)] == [0, 1]
    x = torch.ones(3)
    assert [table.visit(x, 2), table.visit(x, 3)] == [2, 2]
    assert take_snapshot(table).rows["calls"].tolist() == [1, 1, 1, 0]


def test_scan_many(table):
    bad = torch.tensor([NAN, 1.0])
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int64), bad, torch.ones(2).to_sparse(), bad]
    refused = table.scan_many(tensors, [0, 1, 2, 3, 2])
    assert refused == [(1, _C.NOT_FLOAT), (3, _C.NO_VIEW)]
    rows = take_snapshot(table).rows
    assert rows["calls"].tolist() == [1, 0, 2, 0]
    assert rows["nan"].tolist() == [0, 0, 2, 0]
    assert table.scan_many([], []) == []


@pytest.mark.host_only(reason="tensors of one launch have tickets of their own")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_scan_many_is_a_scan_of_each_in_turn(num_threads, threads):
    """More tensors than go together, of all sizes, with bad values here and there, by turns."""
    num_threads(threads)
    torch.manual_seed(0)
    sizes = [0, 1, 7, 500_000, 3, 700_000, 4096, 100_000] * 20
    tensors = [torch.randn(n) for n in sizes]
    for i in range(0, len(tensors), 11):
        if sizes[i]:
            tensors[i][sizes[i] // 2] = (NAN, INF, -INF)[i % 3]
    tensors[5] = torch.randn(1000, 700).t()[::2]
    tensors[6] = torch.randn(64, 1).expand(64, 900_000)
    rows = [i % 150 for i in range(len(tensors))]  # some come twice
    together, in_turn = _C.Table(), _C.Table()
    for _ in range(150):
        together.add_row()
        in_turn.add_row()
    assert together.scan_many(tensors, rows) == []
    for tensor, row in zip(tensors, rows, strict=True):
        assert in_turn.scan(tensor, row) == 0
    ours, theirs = take_snapshot(together), take_snapshot(in_turn)
    assert ours.rows.tobytes() == theirs.rows.tobytes()
    assert ours.order == theirs.order


def refusals():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return {
        "numpy": (np.ones(2), _C.NOT_PLAIN),
        "None": (None, _C.NOT_PLAIN),
        "subclass": (torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})), _C.NOT_PLAIN),
        "int": (torch.ones(2, dtype=torch.int32), _C.NOT_FLOAT),
        "bool": (torch.ones(2, dtype=torch.bool), _C.NOT_FLOAT),
        "float8_e8m0fnu": (
            torch.ones(2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            _C.BAD_FORMAT,
        ),
        "freed": (freed, _C.NO_DATA),
        "sparse": (torch.ones(2).to_sparse(), _C.NO_VIEW),
        "65 dims": (torch.ones(1).as_strided((1,) * 65, (1,) * 65), _C.NO_VIEW),
        "negative bit": (torch.ones(2, dtype=torch.complex64).conj().imag, _C.LAZY_BIT),
        "negative bit, one element": (torch._neg_view(torch.ones(1)), _C.LAZY_BIT),
        "conjugate bit": (torch.ones(2, dtype=torch.complex64).conj(), _C.LAZY_BIT),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_cannot_be_scanned_leaves_no_trace(table, name):
    x, status = refusals()[name]
    assert table.scan(x, 0) == table.visit(x, 0) == table.visit(x, -1) == status
    assert _C.scan_once(x, False) == status
    assert table.describe(0) is None
    snapshot = take_snapshot(table)
    assert snapshot.rows.tobytes() == bytes(4 * ROW.itemsize)
    assert snapshot.order == [0, 0, 0, 0]


def test_a_meta_tensor_is_refused(table):
    meta = torch.ones(2, device="meta")
    assert table.scan(meta, 0) < 0
    assert table.visit(meta, 0) < 0


def test_statuses_are_distinct_and_negative():
    names = ["NOT_PLAIN", "NEEDS_ROW", "NOT_FLOAT", "BAD_FORMAT"]
    names += ["OTHER_DEVICE", "NO_DATA", "NO_VIEW", "LAZY_BIT"]
    values = {getattr(_C, name) for name in names}
    assert len(values) == len(names)
    assert max(values) < 0


@pytest.mark.parametrize("row", [-1, 4, 1000, -5])
def test_a_row_outside_the_table(table, row):
    x = torch.ones(1)
    message = f"row {row} is outside a table of 4 rows"
    with pytest.raises(IndexError, match=message):
        table.scan(x, row)
    with pytest.raises(IndexError, match=message):
        table.scan_many([x], [row])
    for call in (table.describe, table.order):
        with pytest.raises(IndexError, match=message):
            call(row)
    if row != -1:
        with pytest.raises(IndexError, match=message):
            table.visit(x, row)
    assert take_snapshot(table).rows["calls"].sum() == 0


@pytest.mark.parametrize("row", ["0", 1.0, None])
def test_a_row_that_is_no_integer(table, row):
    for call in (table.scan, table.visit):
        with pytest.raises(TypeError):
            call(torch.ones(1), row)
    with pytest.raises(TypeError):
        table.scan_many([torch.ones(1)], [row])


@pytest.mark.parametrize("arguments", [(), (torch.ones(1),), (torch.ones(1), 0, 0)], ids=len)
def test_the_wrong_number_of_arguments(table, arguments):
    for call in (table.scan, table.visit, table.scan_many, _C.scan_once):
        with pytest.raises(TypeError, match=f"expected 2 arguments, got {len(arguments)}"):
            call(*arguments)


@pytest.mark.parametrize(
    ("tensors", "rows"),
    [((torch.ones(1),), [0]), ([torch.ones(1)], (0,)), ([torch.ones(1)], [0, 1]), (None, None)],
    ids=["tuple of tensors", "tuple of rows", "lengths", "None"],
)
def test_scan_many_wants_two_lists_of_one_length(table, tensors, rows):
    with pytest.raises(TypeError, match="two lists of one length"):
        table.scan_many(tensors, rows)


def test_snapshot_wants_arrays_of_the_size_and_type_of_the_table(table):
    rows, order = np.zeros((4, 128), np.uint8), np.zeros(4, np.uint64)
    table.scan(torch.ones(1), 0)
    for wrong_rows, wrong_order in (
        (rows[:3], order),
        (rows, order[:3]),
        (np.zeros((5, 128), np.uint8), order),
    ):
        with pytest.raises(ValueError, match="exactly the table's size"):
            table.snapshot(wrong_rows, wrong_order)
    for wrong_rows, wrong_order in (
        (rows.astype(np.int64), order),
        (rows, order.astype(np.int64)),
        (rows[:, ::2], order),
        (rows.tolist(), order),
    ):
        with pytest.raises(TypeError):
            table.snapshot(wrong_rows, wrong_order)
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        table.snapshot(rows, order)
    assert take_snapshot(table).rows["calls"].sum() == 1


def test_rows_keep_their_values_when_the_table_grows():
    table = _C.Table()
    count = 1300  # chunks hold 512
    for i in range(count):
        assert table.add_row() == i
        assert table.scan(torch.tensor([float(i), NAN]), i) == 0
    rows = take_snapshot(table).rows
    assert rows["calls"].tolist() == [1] * count
    assert [nanscan.ScanResult(row, (2,), torch.float32).max for row in rows] == list(range(count))
    assert rows["ticket"].tolist() == list(range(1, count + 1))


@cases.each_dtype
def test_describe_tells_dtype_and_shape(table, dtype):
    assert table.describe(0) is None
    table.scan(torch.zeros(2, 0, 3, dtype=dtype), 0)
    assert table.describe(0) == (cases.name_of(dtype), (2, 0, 3))
    table.visit(torch.tensor(0, dtype=torch.int8).to(dtype), 1)
    assert table.describe(1) == (cases.name_of(dtype), ())


@pytest.mark.host_only(reason="of a CUDA tensor it is known only when the rows arrived")
def test_describe_is_of_the_first_bad_call_or_of_the_latest(table):
    table.scan(torch.ones(1), 0)
    table.scan(torch.ones(2), 0)
    assert table.describe(0) == ("float32", (2,))
    table.scan(torch.tensor([NAN] * 3), 0)
    table.scan(torch.ones(4), 0)
    table.scan(torch.tensor([NAN] * 5), 0)
    assert table.describe(0) == ("float32", (3,))
    take_snapshot(table)
    table.scan(torch.ones(6, dtype=torch.float16), 0)
    assert table.describe(0) == ("float16", (6,))


@pytest.mark.parametrize("values", [[1.0, -2.0, 0.0, 1e-40], [3.0, NAN, 0.0, INF]])
def test_a_merged_scan_keeps_its_moments(table, values):
    x = torch.tensor(values)
    scan = oracle.scan(x, moments=True)
    table.merge(1, scan.tobytes(), "float32", (4,))
    assert take_snapshot(table).rows[1].tobytes() == scan.tobytes()
    for _ in range(2):
        table.merge(2, scan.tobytes(), "float32", (4,))
    row = take_snapshot(table).rows[2]
    once, twice = (nanscan.ScanResult(r, (4,), torch.float32, moments=True) for r in (scan, row))
    assert (twice.calls, twice.numel) == (2, 8)
    assert (twice.mean, twice.rms) == (once.mean, once.rms)
    assert (twice.zero_count, twice.subnormal_count) == (
        2 * once.zero_count,
        2 * once.subnormal_count,
    )
    assert once.zero_count == 1
    assert twice.first_nonfinite == once.first_nonfinite
