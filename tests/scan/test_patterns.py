"""Every bit pattern of the small formats, alone and together; the telling ones of the large."""

import numpy as np
import pytest
import torch

import nanscan
from helpers import cases
from helpers.cases import FORMATS, Patterns, decode, from_bits, name_of

SMALL = [dtype for dtype in FORMATS if dtype.itemsize <= 2]
LARGE = [dtype for dtype in FORMATS if dtype.itemsize > 2]


def edge_patterns(dtype):
    """Every exponent and sign, with the mantissas at which something changes."""
    exponent, mantissa, _, _ = FORMATS[dtype]
    edges = {0, 1, 2, (1 << (mantissa - 1)) - 1, 1 << (mantissa - 1), (1 << mantissa) - 1}
    return [e << mantissa | m for e in range(1 << (exponent + 1)) for m in sorted(edges)]


def assert_one_element_scans(bits, dtype):
    for pattern, x in zip(bits, from_bits(bits, dtype).unbind(), strict=True):
        value = decode(pattern, dtype)
        result = nanscan.check(x)
        finite = abs(value) < float("inf")
        assert result.is_finite == finite, hex(pattern)
        assert result.nan_count == (value != value), hex(pattern)  # noqa: PLR0124 - NaN alone
        assert result.posinf_count == (value == float("inf")), hex(pattern)
        assert result.neginf_count == (value == -float("inf")), hex(pattern)
        if finite:
            assert result.min.hex() == result.max.hex() == value.hex(), hex(pattern)
        else:
            assert result.min is result.max is None


@pytest.mark.parametrize("dtype", SMALL, ids=name_of)
def test_every_pattern_alone(dtype):
    assert_one_element_scans(range(1 << 8 * dtype.itemsize), dtype)


@pytest.mark.parametrize("dtype", LARGE, ids=name_of)
def test_edges_of_every_exponent_alone(dtype):
    assert_one_element_scans(edge_patterns(dtype), dtype)


@pytest.mark.parametrize("repeat", [1, 5])
@pytest.mark.parametrize("dtype", SMALL, ids=name_of)
def test_every_pattern_together(dtype, repeat):
    x = from_bits(np.tile(np.arange(1 << 8 * dtype.itemsize), repeat), dtype)
    assert cases.found(nanscan.check(x)) == cases.brute_force(x)


@pytest.mark.parametrize("dtype", FORMATS, ids=name_of)
def test_every_pattern_in_every_lane(dtype):
    """Each pattern fills a whole vector kernel: no lane reads it differently."""
    bits = range(256) if dtype.itemsize == 1 else edge_patterns(dtype)
    if len(bits) > 4096:
        bits = bits[:: len(bits) // 4096]
    n = 1000 // dtype.itemsize
    for pattern in bits:
        value = decode(pattern, dtype)
        result = nanscan.check(from_bits([pattern], dtype).repeat(n))
        counts = (result.nan_count, result.posinf_count, result.neginf_count)
        if abs(value) < float("inf"):
            assert counts == (0, 0, 0), hex(pattern)
            assert result.min.hex() == result.max.hex() == value.hex(), hex(pattern)
        else:
            kinds = (value != value, value == float("inf"), value == -float("inf"))  # noqa: PLR0124
            assert counts == tuple(n * kind for kind in kinds), hex(pattern)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", FORMATS, ids=name_of)
def test_random_patterns(dtype, seed):
    rng = np.random.default_rng(seed)
    top = (1 << 8 * dtype.itemsize) - 1
    bits = rng.integers(0, top, 20_000, np.uint64, endpoint=True)
    bits[rng.integers(0, len(bits), 50)] = rng.choice(np.array(Patterns(dtype).bad, np.uint64), 50)
    x = from_bits(bits, dtype)
    assert cases.found(nanscan.check(x)) == cases.brute_force(x)
    cases.assert_same_as_reference(x)


@pytest.mark.parametrize("dtype", FORMATS, ids=name_of)
def test_the_decoder_of_the_tests_agrees_with_torch(dtype):
    bits = range(1 << 8 * dtype.itemsize) if dtype in SMALL else edge_patterns(dtype)
    values = from_bits(bits, dtype)
    if dtype.itemsize == 1:
        values = values.to(torch.float32)
    decoded = [decode(pattern, dtype) for pattern in bits]
    torch.testing.assert_close(
        values.to(torch.float64),
        torch.tensor(decoded, dtype=torch.float64),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
