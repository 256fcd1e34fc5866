"""Sums of moments in every instruction set: exact where they can be, else within a stated bound."""

import math

import numpy as np
import pytest
import torch

from helpers import cases
from helpers.cases import Patterns, name_of
from nanscan import _C
from nanscan._data.row import ROW

each_variant = pytest.mark.parametrize("variant", _C.variants())
SIZES = [1, 33, 1000, 5003, 50_003]


def row_of(x):
    return np.frombuffer(_C.scan_once(x, True), ROW)[0]


def constant(n, _tiny, _top, _rng):
    """The same rounding again and again."""
    return np.full(n, 0.1)


def offset(n, _tiny, top, rng):
    """A large mean and a small spread."""
    return top / 4 * (1 + rng.standard_normal(n) / 100)


def cancelling(n, tiny, top, rng):
    """Large values of both signs, between small ones that remain."""
    values = rng.standard_normal(n) * math.sqrt(tiny)
    values[: n // 2] = rng.uniform(top / 2, top, n // 2)
    values[n - n // 2 :] = -values[: n // 2]
    return values[rng.permutation(n)]


def mixed(n, tiny, top, rng):
    """Every magnitude that the format has."""
    return np.exp2(rng.uniform(np.log2(tiny), np.log2(top), n)) * rng.choice([-1, 1], n)


def adversarial(dtype, content, n):
    """Float64 that overflows in no sum of squares; other formats over their whole range."""
    info = torch.finfo(dtype)
    tiny, top = (1e-100, 1e100) if dtype == torch.float64 else (info.smallest_normal / 4, info.max)
    values = content(n, tiny, top * 0.99, np.random.default_rng(n))
    return torch.from_numpy(values).to(torch.float32 if dtype.itemsize < 8 else dtype).to(dtype)


def roundings(n, dtype):
    """That a sum of n elements in the narrowest vectors, of 16 bytes, has: run, lanes, totals."""
    in_a_lane = 128 // dtype.itemsize
    runs = n * dtype.itemsize // (64 * 16) + 3  # and what precedes and follows the whole vectors
    return min(in_a_lane + 5 + runs, n // 8 + 7)


def assert_within_bound(x, row, threads=1):
    values = cases.oracle.as_float64(x).ravel()
    values = values[np.isfinite(values)]
    unit = (roundings(x.numel(), x.dtype) + 8 * (threads - 1)) * 2.0**-53
    assert abs(row["sum"] - math.fsum(values)) <= unit * np.abs(values).sum()
    if x.dtype == torch.float64:  # its squares need more bits
        squares = values.astype(np.longdouble) ** 2
        exact, unit = squares.sum(), unit + 2.0**-53
    else:
        squares = values**2
        exact = math.fsum(squares)
    assert abs(row["sumsq"] - exact) <= unit * exact


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "with NaN and Inf"])
@pytest.mark.parametrize("content", [constant, offset, cancelling, mixed], ids=lambda c: c.__name__)
@cases.each_real_dtype
@each_variant
def test_sums_of_adversarial_data_are_within_the_bound(variant, dtype, content, bad, use_variant):
    use_variant(variant)
    for n in SIZES:
        for skipped in (0, 1):
            x = adversarial(dtype, content, n + skipped)[skipped:]
            if bad:
                integers = cases.as_integers(x)
                kinds = cases.as_integers(cases.from_bits(Patterns(dtype).bad, dtype))
                for i, kind in enumerate(kinds):
                    integers[i :: 7 * len(kinds)] = kind
            assert_within_bound(x, row_of(x))


@pytest.mark.parametrize("threads", [2, 4])
@each_variant
def test_sums_on_several_threads_are_within_the_bound(variant, threads, use_variant, num_threads):
    use_variant(variant)
    num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for content in (constant, cancelling, mixed):
            x = adversarial(dtype, content, 300_001)
            assert_within_bound(x, row_of(x), threads)


@pytest.mark.parametrize("skipped", [0, 1, 63])
@cases.each_real_dtype
@each_variant
def test_a_value_at_every_position_is_summed_once(variant, dtype, skipped, use_variant):
    """Among zeros, so that the sum is exact: before, in and after the whole vectors of a scan."""
    use_variant(variant)
    patterns = Patterns(dtype)
    size = 2 * 256 // dtype.itemsize + 69
    memory = np.zeros(skipped + size, f"u{dtype.itemsize}")
    x = torch.from_numpy(memory).view(dtype)[skipped:]
    for bits in (patterns.max_finite, patterns.smallest_normal - 1):
        value = cases.decode(bits, dtype)
        for i in range(size):
            memory[skipped + i] = bits
            row = row_of(x)
            found = (row["sum"], row["sumsq"], row["zeros"], row["subnormals"])
            subnormal = bits < patterns.smallest_normal
            if dtype == torch.float64:  # whose squares overflow, or vanish
                found, expected = found[:1] + found[2:], (value, size - 1, subnormal)
            else:
                expected = (value, value * value, size - 1, subnormal)
            assert found == expected
            memory[skipped + i] = 0


@pytest.mark.parametrize("flush", [False, True], ids=["", "subnormals flushed to zero"])
@pytest.mark.parametrize("dtype", [d for d in cases.FORMATS if d.itemsize <= 2], ids=name_of)
@each_variant
def test_every_value_is_widened_exactly(variant, dtype, flush, use_variant):
    use_variant(variant)
    all_bits = np.arange(1 << (8 * dtype.itemsize))
    values = [cases.decode(int(bits), dtype) for bits in all_bits]
    x = cases.from_bits(all_bits, dtype)
    torch.set_flush_denormal(flush)
    try:
        rows = [_C.scan_once(one, True) for one in x.split(1)]
    finally:
        torch.set_flush_denormal(False)
    found = np.frombuffer(b"".join(rows), ROW)
    expected = np.where(np.isfinite(values), values, 0)
    np.testing.assert_array_equal(found["sum"], expected)
    np.testing.assert_array_equal(found["sumsq"], expected**2)


@each_variant
def test_float32_values_are_widened_exactly_where_subnormals_are_flushed(variant, use_variant):
    """Every exponent and every bit of the mantissa, one by one and together."""
    use_variant(variant)
    bits = [1 << i for i in range(31)] + [(1 << i) - 1 for i in range(1, 31)]
    bits += [e << 23 | 0x2AAAAA for e in range(255)]
    bits = [b for b in bits if b < 0x7F800000]
    bits += [b | 1 << 31 for b in bits]
    x = cases.from_bits(bits, torch.float32)
    torch.set_flush_denormal(True)
    try:
        rows = [_C.scan_once(one, True) for one in x.split(1)]
        all_of_them = row_of(x)
    finally:
        torch.set_flush_denormal(False)
    found = np.frombuffer(b"".join(rows), ROW)
    expected = np.array([cases.decode(b, torch.float32) for b in bits])
    np.testing.assert_array_equal(found["sum"], expected)
    np.testing.assert_array_equal(found["sumsq"], expected**2)
    assert_within_bound(x, all_of_them)
