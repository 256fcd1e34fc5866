"""check against two oracles: the reference scan in torch and NumPy, and brute force in Python."""

import numpy as np
import pytest
import torch

import nanscan
from helpers import cases
from helpers.cases import Patterns, brute_force, fields, found, name_of, real_dtype, reference
from nanscan import _C
from nanscan._data.row import ROW
from nanscan._scan import reference as oracle

BORDERS = [0, 1, 7, 8, 9, *range(31, 34), *range(63, 66), *range(127, 130)]
BORDERS += [1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 65537]
PARALLEL = 1 << 20  # bytes, from which on several threads scan


@cases.each_layout
def test_layouts(dtype, layout, device):
    tensors = cases.build(dtype, layout, device)
    results = {content: fields(nanscan.check(x)) for content, x in tensors.items()}
    assert results == {content: fields(reference(x)) for content, x in tensors.items()}


@cases.each_layout
def test_layouts_are_what_their_names_say(dtype, layout):
    for x in cases.build(dtype, layout).values():
        assert x.dtype == dtype
        assert x.is_neg() == (layout in ("negative bit", "imaginary of conjugate"))
        assert x.is_conj() == (layout == "conjugate")
        if dtype.itemsize > 1:
            assert x.data_ptr() % 2 == layout.startswith("misaligned")
        assert (0 in x.stride()) == layout.startswith("expanded")
        assert (x.numel() == 0) == layout.startswith("empty")


@cases.each_layout
def test_both_oracles_follow_the_definition(dtype, layout):
    for content, whole in cases.build(dtype, layout).items():
        x = whole if whole.numel() <= 720 else whole[-3:, -50:] if whole.ndim == 2 else whole[-200:]
        expected = {content: brute_force(x)}
        assert {content: found(nanscan.check(x))} == expected
        assert {content: found(reference(x))} == expected


@pytest.mark.parametrize("size", BORDERS)
@cases.each_dtype
def test_sizes(dtype, size, device):
    patterns = Patterns(real_dtype(dtype))
    x = cases.buffer(dtype, cases.Content(), size).to(device)
    cases.assert_same_as_reference(x)
    for position in {0, size // 2, size - 1} if size else ():
        y = x.clone()
        cases.plant(y, position * (2 if dtype.is_complex else 1), patterns.bad[-1])
        result = cases.assert_same_as_reference(y)
        assert result.first_nonfinite == (position,)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("excess", [-1, 0, 1, PARALLEL + 13])
@cases.each_dtype
def test_sizes_around_the_parallel_threshold(dtype, excess, threads, num_threads):
    num_threads(threads)
    size = (PARALLEL + excess) // dtype.itemsize + (excess > 0)
    patterns = Patterns(real_dtype(dtype))
    x = cases.buffer(dtype, cases.Content(), size)
    assert cases.assert_same_as_reference(x).is_finite
    for place, bits in (
        (-1, patterns.bad[0]),
        (size // 2, patterns.bad[-1]),
        (3, patterns.bad[-1]),
    ):
        cases.plant(x, place, bits)
        cases.assert_same_as_reference(x)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda b: b.view(-1, 2000)[:, 3:1995], id="long rows"),
        pytest.param(lambda b: b.view(-1, 8)[:, :5], id="short rows"),
        pytest.param(lambda b: b[1::2], id="stepped"),
        pytest.param(lambda b: b.expand(3, -1), id="expanded"),
        pytest.param(lambda b: b.view(-1, 1, 1000).expand(-1, 3, -1), id="expanded amid"),
        pytest.param(lambda b: b.view(-1, 2000).t(), id="transposed"),
        pytest.param(lambda b: b.view(-1, 100, 40)[:, ::2].permute(1, 2, 0), id="sliced, permuted"),
    ],
)
@cases.each_dtype
def test_large_layouts(dtype, view, num_threads):
    num_threads(3)
    patterns = Patterns(real_dtype(dtype))
    x = view(cases.buffer(dtype, cases.Content(), 3_072_000 // dtype.itemsize))
    assert cases.assert_same_as_reference(x).is_finite
    cases.plant(x, x.numel() // 3, patterns.bad[-1])
    cases.plant(x, x.numel() // 3 + 4099, patterns.bad[0])
    assert not cases.assert_same_as_reference(x).is_finite


@pytest.mark.parametrize("offset", [0, 1, 7, 31, 63])
@cases.each_real_dtype
def test_a_bad_value_at_every_position(dtype, offset):
    """Head, whole vectors and tail of a scan: no position is skipped and none is counted twice."""
    size = 2 * 256 // dtype.itemsize + 69  # two steps of the widest kernel, a head and a tail
    bits = Patterns(dtype).random_finite(offset + size)
    memory = bits.astype(f"u{dtype.itemsize}")
    x = torch.from_numpy(memory).view(dtype)[offset:]
    for i in range(size):
        for bad in (Patterns(dtype).bad[0], Patterns(dtype).bad[-1]):
            memory[offset + i] = bad
            result = nanscan.check(x)
            assert result.nonfinite_count == 1
            assert result.first_nonfinite == (i,)
        memory[offset + i] = bits[offset + i]


@pytest.mark.parametrize("offset", [0, 1, 63])
@cases.each_real_dtype
def test_an_extreme_at_every_position(dtype, offset):
    """The largest and smallest values, of finite and of partly bad data, wherever they stand."""
    patterns = Patterns(dtype)
    size = 2 * 256 // dtype.itemsize + 69
    memory = np.full(offset + size, patterns.smallest_normal, f"u{dtype.itemsize}")
    x = torch.from_numpy(memory).view(dtype)[offset:]
    high = cases.decode(patterns.max_finite, dtype)
    for i in range(size):
        j = (i + 100) % size
        for sign, extreme in ((0, "max"), (patterns.sign, "min")):
            memory[:] = patterns.smallest_normal
            memory[offset + i] = patterns.max_finite | sign
            assert abs(getattr(nanscan.check(x), extreme)) == high
            memory[offset + j] = patterns.bad[0]
            assert abs(getattr(nanscan.check(x), extreme)) == high


@cases.each_dtype
def test_every_element_bad(dtype, device):
    """More of them in one lane than a counter of 8 bits holds."""
    patterns = Patterns(real_dtype(dtype))
    for bits in patterns.bad:
        x = cases.buffer(dtype, cases.Content(everywhere=[bits]), 70_001).to(device)
        result = cases.assert_same_as_reference(x)
        assert result.nonfinite_count == result.numel
        assert result.min is result.max is result.absmax is None


@pytest.mark.parametrize("bad_every", [1, 2, 5, 4096, 5000])
@cases.each_dtype
def test_bad_values_then_clean_ones_then_bad_ones(dtype, bad_every, device):
    patterns = Patterns(real_dtype(dtype))
    x = cases.buffer(dtype, cases.Content(), 30_000).to(device)
    integers = cases.as_integers(x).flatten()
    bad = cases.as_integers(cases.from_bits(patterns.bad, real_dtype(dtype))).to(device)
    for start, stop in ((0, 9000), (21_000, 30_000)):
        piece = integers[start:stop:bad_every]
        piece.copy_(bad.repeat(len(piece) // len(bad) + 1)[: len(piece)])
    cases.assert_same_as_reference(x)


@cases.each_layout
def test_counts_of_moments(dtype, layout, device):
    for content, x in cases.build(dtype, layout, device).items():
        result = nanscan.check(x, moments=True)
        expected = oracle.scan(x, moments=True)
        counts = (content, result.zero_count, result.subnormal_count)
        assert counts == (content, expected["zeros"], expected["subnormals"])
        assert fields(result) == fields(nanscan.check(x))


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "with NaN"])
@cases.each_layout
def test_sums_of_moments(dtype, layout, bad, device):
    real = real_dtype(dtype)
    n = cases.BUFFER * (2 if dtype.is_complex else 1)
    values = torch.randn(n, generator=torch.Generator().manual_seed(1)) + 0.25
    x = cases.LAYOUTS[layout].view(values.to(real).view(dtype).to(device))
    if bad:
        cases.fill(x, cases.Content(planted={0.3: Patterns(real).nans[0]}))
    result = nanscan.check(x, moments=True)
    finite = oracle.as_float64(x)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        assert result.mean is result.std is result.rms is None
        return
    assert result.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12)
    assert result.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-12)
    assert result.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("dtype", cases.FORMATS, ids=name_of)
def test_moments_widen_every_exponent_exactly(dtype):
    """One value of each exponent alone: its sum is the value, its mean square the square."""
    _, mantissa, _, _ = cases.FORMATS[dtype]
    patterns = Patterns(dtype)
    for bits in range(1, patterns.max_finite, max(1, (1 << mantissa) - 1)):
        for signed in (bits, bits | patterns.sign):
            value = cases.decode(signed, dtype)
            row = np.frombuffer(_C.scan_once(cases.from_bits([signed], dtype), True), ROW)[0]
            assert row["sum"] == value
            assert row["sumsq"] == value * value


def test_more_than_64_dimensions_are_refused():
    x = torch.ones(1).as_strided((1,) * 64, (1,) * 64)
    assert nanscan.check(x).numel == 1
    assert nanscan.check(x.to(torch.complex64)).numel == 2
    for dims in (65, 66, 1000):
        with pytest.raises(TypeError, match=f"{dims} dimensions"):
            nanscan.check(torch.ones(1).as_strided((1,) * dims, (1,) * dims))
