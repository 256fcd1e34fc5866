"""What the scan tests combine: dtypes, bit patterns, contents and layouts; and how they compare.

Everything about formats is said again here, in plain Python integers, so that a mistake in
csrc/float_format.h or in nanscan._scan.reference cannot hide in its own mirror image.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import nanscan
from nanscan import _C
from nanscan._data.dtypes import DTYPES
from nanscan._data.row import ROW
from nanscan._scan import reference as oracle

BUFFER = 8192  # elements behind every layout: enough for rows that are scanned in place


class Format(NamedTuple):
    exponent: int
    mantissa: int
    bias: int
    family: str


FORMATS = {
    torch.float16: Format(5, 10, 15, "ieee"),
    torch.bfloat16: Format(8, 7, 127, "ieee"),
    torch.float32: Format(8, 23, 127, "ieee"),
    torch.float64: Format(11, 52, 1023, "ieee"),
    torch.float8_e4m3fn: Format(4, 3, 7, "fn"),
    torch.float8_e5m2: Format(5, 2, 15, "ieee"),
    torch.float8_e4m3fnuz: Format(4, 3, 8, "fnuz"),
    torch.float8_e5m2fnuz: Format(5, 2, 16, "fnuz"),
}
FLOAT8 = [dtype for dtype in FORMATS if dtype.itemsize == 1]
WIDE = [dtype for dtype in FORMATS if dtype.itemsize > 1]
COMPLEX = [dtype for dtype in DTYPES if dtype.is_complex]
PAIRED = {dtype.to_real(): dtype for dtype in COMPLEX}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def decode(bits: int, dtype: torch.dtype) -> float:
    """The value of a bit pattern of a real format."""
    exponent_bits, mantissa_bits, bias, family = FORMATS[dtype]
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if family == "fnuz":
        if bits == 1 << (exponent_bits + mantissa_bits):
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        if family == "ieee":
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return sign * math.ldexp(fraction, max(exponent, 1) - bias)


class Patterns:
    """Bit patterns of a real format that deserve a test."""

    def __init__(self, dtype: torch.dtype) -> None:
        exponent, mantissa, _, family = FORMATS[dtype]
        self.width = exponent + mantissa + 1
        self.sign = sign = 1 << (self.width - 1)
        ones = (1 << mantissa) - 1
        top = ((1 << exponent) - 1) << mantissa
        if family == "ieee":
            payloads = (1, 1 << (mantissa - 1), ones)
            self.nans = [s | top | payload for payload in payloads for s in (0, sign)]
            self.infs = [top, top | sign]
            self.max_finite = top - 1
        elif family == "fn":
            self.nans, self.infs, self.max_finite = [sign - 1, 2 * sign - 1], [], sign - 2
        else:
            self.nans, self.infs, self.max_finite = [sign], [], sign - 1
        self.bad = self.nans + self.infs
        self.zeros = [0] if family == "fnuz" else [sign, 0]
        self.subnormals = [s | magnitude for magnitude in (1, ones) for s in (0, sign)]
        self.smallest_normal = 1 << mantissa

    def random_finite(self, n: int, seed: int = 0) -> np.ndarray:
        """Uniform over the finite bit patterns, so over all exponents. Not to be written to."""
        return _random_finite(self.max_finite, self.sign, n, seed)


@functools.lru_cache(maxsize=16)  # a test of each layout asks for the same of its dtype
def _random_finite(max_finite: int, sign: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    magnitudes = rng.integers(0, max_finite, n, np.uint64, endpoint=True)
    signs = rng.integers(0, 2, n, np.uint64) * np.uint64(sign)
    bits = np.where(magnitudes == 0, np.uint64(0), magnitudes | signs)
    bits.flags.writeable = False
    return bits


def from_bits(bits: Sequence[int] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor with these patterns; twice as many for a complex one."""
    real = real_dtype(dtype)
    unsigned = np.asarray(bits, np.uint64).astype(f"u{real.itemsize}")
    values = torch.from_numpy(unsigned).view(real)
    return torch.view_as_complex(values.view(len(values) // 2, 2)) if dtype.is_complex else values


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The memory behind a view, of the same strides, as integers; complex as pairs."""
    if x.is_neg():
        x = torch._neg_view(x)
    if x.is_conj():
        x = x.conj()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(INTEGERS[x.dtype.itemsize])


def plant(x: torch.Tensor, position: int, bits: int) -> None:
    """Writes a pattern at a row-major position, counted from the end if negative."""
    integers = as_integers(x)
    width = 8 * integers.dtype.itemsize
    index = np.unravel_index(position % integers.numel(), integers.shape)
    integers[tuple(map(int, index))] = bits - (1 << width) if bits >> (width - 1) else bits


class Content(NamedTuple):
    everywhere: list[int] | None = None  # None: random finite values
    planted: Mapping[float, int] = MappingProxyType({})  # by place, from 0.0 (first) to 1.0 (last)


CONTENTS: dict[str, Callable[[Patterns], Content]] = {
    "finite": lambda _: Content(),
    "nan first": lambda p: Content(planted={0.0: p.nans[0]}),
    "nan middle": lambda p: Content(planted={0.5: p.nans[-1]}),
    "bad last": lambda p: Content(planted={1.0: p.bad[-1]}),
    "one of each": lambda p: Content(planted={(i + 1) / 16: bits for i, bits in enumerate(p.bad)}),
    "nan everywhere": lambda p: Content(everywhere=p.nans),
    "bad everywhere": lambda p: Content(everywhere=p.bad),
    "zeros": lambda p: Content(everywhere=p.zeros),
    "zeros of one sign": lambda p: Content(everywhere=p.zeros[:1]),
    "subnormals": lambda p: Content(everywhere=p.subnormals),
    "extremes": lambda p: Content(planted={0.2: p.max_finite, 0.8: p.max_finite | p.sign}),
}


def misaligned(flat: torch.Tensor) -> torch.Tensor:
    """The same at an odd address."""
    raw = bytearray(1) + flat.cpu().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(raw, dtype=flat.dtype, offset=1)


def imaginary(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(PAIRED[flat.dtype]).conj().imag


class Layout(NamedTuple):
    view: Callable[[torch.Tensor], torch.Tensor]  # from the flat buffer
    dtypes: Sequence[torch.dtype] = DTYPES


LAYOUTS = {
    "contiguous": Layout(lambda b: b[:360].view(3, 4, 5, 6)),
    "channels_last": Layout(lambda b: b[:360].view(3, 5, 6, 4).permute(0, 3, 1, 2)),
    "transposed": Layout(lambda b: b[:600].view(20, 30).t()),
    "permuted": Layout(lambda b: b[:360].view(3, 4, 5, 6).permute(2, 0, 3, 1)),
    "sliced": Layout(lambda b: b[:720].view(8, 9, 10)[1::2, ::3, 2:9]),
    "stepped inside": Layout(lambda b: b[:720].view(8, 9, 10)[..., ::2]),
    "stepped flat": Layout(lambda b: b[5::3]),
    "column": Layout(lambda b: b[:720].view(24, 30)[:, 3]),
    "short rows": Layout(lambda b: b.view(1024, 8)[:, 1:6]),
    "long rows": Layout(lambda b: b.view(4, 2048)[:, 5:1700]),
    "long rows transposed": Layout(lambda b: b.view(4, 2048)[:, 5:1700].t()),
    "many dims": Layout(
        lambda b: b[:4096].view((2,) * 12).permute(*range(0, 12, 2), *range(1, 12, 2))
    ),
    "expanded outside": Layout(lambda b: b[:50].expand(8, 50)),
    "expanded amid": Layout(lambda b: b[:30].view(5, 1, 6).expand(5, 7, 6)),
    "expanded inside": Layout(lambda b: b[:30].view(30, 1).expand(30, 9)),
    "expanded twice": Layout(lambda b: b[:30].view(5, 1, 6, 1).expand(5, 7, 6, 3).transpose(0, 2)),
    "expanded scalar": Layout(lambda b: b[7].expand(4, 5)),
    "unfolded": Layout(lambda b: b[:100].unfold(0, 7, 3)),
    "overlapping": Layout(lambda b: b.as_strided((5, 6, 7), (2, 3, 1), 11)),
    "equal strides": Layout(lambda b: b.as_strided((4, 5), (1, 1), 2)),
    "zero-dim": Layout(lambda b: b[5]),
    "empty": Layout(lambda b: b[:0]),
    "empty inside": Layout(lambda b: b[:0].view(3, 0)),
    "empty outside": Layout(lambda b: b[:0].view(0, 3)),
    "size one": Layout(lambda b: b[:12].view(1, 3, 1, 4, 1)),
    "size one, odd strides": Layout(lambda b: b.as_strided((1, 3, 1), (17, 2, 99))),
    "offset": Layout(lambda b: b[3:4003]),
    "misaligned": Layout(misaligned),
    "misaligned rows": Layout(lambda b: misaligned(b).view(4, 2048)[:, 7:1500]),
    "misaligned columns": Layout(lambda b: misaligned(b[:600]).view(20, 30).t()),
    "negative bit": Layout(
        lambda b: torch._neg_view(b[:600].view(20, 30)), [d for d in DTYPES if d not in FLOAT8]
    ),
    "conjugate": Layout(lambda b: b[:600].view(20, 30).conj(), COMPLEX),
    "imaginary of conjugate": Layout(imaginary, list(PAIRED)),
}


def buffer(dtype: torch.dtype, content: Content, n: int = BUFFER) -> torch.Tensor:
    """A flat tensor of n elements with the content's values, nothing planted yet."""
    n *= 2 if dtype.is_complex else 1
    if content.everywhere is None:
        return from_bits(Patterns(real_dtype(dtype)).random_finite(n), dtype)
    bits = np.array(content.everywhere, np.uint64)
    return from_bits(np.tile(bits, n // len(bits) + 1)[:n], dtype)


def fill(x: torch.Tensor, content: Content) -> torch.Tensor:
    last = as_integers(x).numel() - 1
    for place, bits in content.planted.items() if last >= 0 else ():
        plant(x, round(place * last), bits)
    return x


def build(dtype: torch.dtype, layout: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One tensor of this layout for each content."""
    patterns = Patterns(real_dtype(dtype))
    tensors = {}
    for name, content_of in CONTENTS.items():
        content = content_of(patterns)
        x = LAYOUTS[layout].view(buffer(dtype, content).to(device))
        if x.device.type != device:
            pytest.skip("torch makes tensors at odd addresses in host memory only")
        tensors[name] = fill(x, content)
    return tensors


DTYPE_LAYOUTS = [
    pytest.param(dtype, name, id=f"{name_of(dtype)}-{name}")
    for name, layout in LAYOUTS.items()
    for dtype in layout.dtypes
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
each_real_dtype = pytest.mark.parametrize("dtype", FORMATS, ids=name_of)
each_layout = pytest.mark.parametrize(("dtype", "layout"), DTYPE_LAYOUTS)

FIELDS = (
    *("shape", "dtype", "numel", "nan_count", "posinf_count", "neginf_count", "calls"),
    *("_max_key", "_min_key", "_first_bad"),
)


def fields(result: nanscan.ScanResult) -> dict[str, object]:
    return {name: getattr(result, name) for name in FIELDS}


def reference(x: torch.Tensor) -> nanscan.ScanResult:
    return nanscan.ScanResult(oracle.scan(x), tuple(x.shape), x.dtype)


def assert_same_as_reference(x: torch.Tensor) -> nanscan.ScanResult:
    """check(x), after comparing every field with the reference scan, exactly."""
    result = nanscan.check(x)
    assert fields(result) == fields(reference(x))
    return result


def brute_force(x: torch.Tensor) -> dict[str, object]:
    """What a scan must find, by the definition: one Python float after another."""
    dtype = real_dtype(x.dtype)
    mask = (1 << 8 * dtype.itemsize) - 1
    integers = as_integers(x.resolve_conj().resolve_neg())
    values = [decode(bits & mask, dtype) for bits in integers.flatten().tolist()]
    finite = sorted(filter(math.isfinite, values), key=lambda v: (v, math.copysign(1, v)))
    bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
    return {
        "elements": len(values),
        "nan": sum(map(math.isnan, values)),
        "posinf": values.count(math.inf),
        "neginf": values.count(-math.inf),
        "min": finite[0].hex() if finite else None,
        "max": finite[-1].hex() if finite else None,
        "first_bad": bad[0] if bad else None,
    }


def found(result: nanscan.ScanResult) -> dict[str, object]:
    """A result in the terms of `brute_force`."""
    return {
        "elements": result.numel,
        "nan": result.nan_count,
        "posinf": result.posinf_count,
        "neginf": result.neginf_count,
        "min": None if result.min is None else result.min.hex(),
        "max": None if result.max is None else result.max.hex(),
        "first_bad": None if result._first_bad == 0 else result._first_bad ^ ((1 << 64) - 1),
    }


class Snapshot(NamedTuple):
    rows: np.ndarray  # of nanscan._data.row.ROW
    order: list[int]


def take_snapshot(table: _C.Table) -> Snapshot:
    memory = np.empty((len(table), ROW.itemsize), np.uint8)
    order = np.empty(len(table), np.uint64)
    _, arrival = table.snapshot(memory, order)
    if arrival is not None:
        arrival.wait()
        arrival.merge_into(memory, order)
    return Snapshot(memory.view(ROW)[:, 0], order.tolist())
