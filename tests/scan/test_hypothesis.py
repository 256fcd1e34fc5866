"""Any shape, strides and offset in a buffer, any bad values: check equals the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanscan
from helpers import cases
from helpers.cases import FORMATS, Patterns, from_bits, real_dtype
from nanscan import _C
from nanscan._data.dtypes import DTYPES

SETTINGS = settings(max_examples=400, deadline=None)


seeds = st.integers(0, 1 << 30)


def random_finite(dtype, n, seed):
    bits = Patterns(real_dtype(dtype)).random_finite(n * (2 if dtype.is_complex else 1), seed)
    return from_bits(bits, dtype)


@st.composite
def planted(draw, x):
    """The tensor with a few elements, as it is indexed, made bad or otherwise special."""
    patterns = Patterns(real_dtype(x.dtype))
    finite = [*patterns.zeros, *patterns.subnormals, patterns.max_finite]
    values = st.sampled_from([*patterns.infs, patterns.nans[0]]) | st.sampled_from(
        [*patterns.nans, *finite]
    )
    if n := cases.as_integers(x).numel():
        places = st.sets(st.integers(0, n - 1), min_size=draw(st.integers(0, 1)), max_size=4)
        for place in draw(places):
            cases.plant(x, place, draw(values))
    return x


@st.composite
def strided(draw, sizes, strides, max_dims):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(sizes, max_size=max_dims))
    steps = draw(st.lists(strides, min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 70))
    reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True) if size > 1)
    buffer = random_finite(dtype, offset + reach + 1, draw(seeds))
    return draw(planted(buffer.as_strided(shape, steps, offset)))


@st.composite
def permuted(draw):
    """Dense in some dimension order, then perhaps sliced: what real models hand over."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    x = random_finite(dtype, torch.Size(shape).numel(), draw(seeds)).view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    for dim in draw(st.sets(st.integers(0, len(shape) - 1), max_size=2)):
        start = draw(st.integers(0, x.shape[dim]))
        stop = draw(st.integers(start, x.shape[dim]))
        x = x.movedim(dim, 0)[start : stop : draw(st.integers(1, 3))].movedim(0, dim)
    return draw(planted(x))


def check_and_index(x):
    result = cases.assert_same_as_reference(x)
    if x.is_complex():
        finite = torch.view_as_real(x).isfinite().all(-1)
    else:
        finite = x.to(torch.float64 if x.dtype.itemsize > 1 else torch.float32).isfinite()
    bad = (~finite).nonzero()
    assert result.first_nonfinite == (tuple(bad[0].tolist()) if len(bad) else None)


SIZES = st.integers(1, 6) | st.integers(0, 6)  # mostly not empty
STRIDES = st.just(0) | st.integers(0, 9)


@given(strided(sizes=SIZES, strides=STRIDES, max_dims=5))
@SETTINGS
def test_any_small_strides(x):
    check_and_index(x)


@given(strided(sizes=st.integers(1, 1500), strides=st.integers(0, 1600), max_dims=2))
@settings(SETTINGS, max_examples=100)
def test_any_long_strides(x):
    check_and_index(x)


@given(permuted())
@SETTINGS
def test_any_dimension_order(x):
    check_and_index(x)


@given(
    dtype=st.sampled_from(list(FORMATS)),
    start=st.integers(0, 130),
    size=st.integers(0, 9000),
    data=st.data(),
)
@SETTINGS
def test_any_start_and_size(dtype, start, size, data):
    x = random_finite(dtype, start + size, data.draw(seeds))
    check_and_index(data.draw(planted(x[start:])))


@given(dtype=st.sampled_from(list(FORMATS)), data=st.data())
@SETTINGS
def test_a_row_of_many_scans_is_the_row_of_all_the_values(dtype, data):
    """Rows merge: over pieces in any cut, everything but the index of the first is the same."""
    whole = data.draw(
        planted(random_finite(dtype, data.draw(st.integers(1, 3000)), data.draw(seeds)))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    pieces = torch.tensor_split(whole, cuts)
    table = _C.Table()
    row = table.add_row()
    for piece in pieces:
        assert table.scan(piece, row) == 0
    merged = cases.take_snapshot(table).rows[row]
    expected = cases.reference(whole)
    result = nanscan.ScanResult(merged, tuple(whole.shape), dtype)
    for name in ("numel", "nan_count", "posinf_count", "neginf_count", "_max_key", "_min_key"):
        assert getattr(result, name) == getattr(expected, name)
    bad_pieces = [i + 1 for i, piece in enumerate(pieces) if not nanscan.check(piece).is_finite]
    assert merged["calls"] == len(pieces)
    assert merged["first_bad_call"] == (bad_pieces[0] if bad_pieces else 0)
    if bad_pieces:
        first = nanscan.check(pieces[bad_pieces[0] - 1])
        assert result._first_bad == first._first_bad
