"""check, check_many, assert_finite and ScanResult, as a user meets them."""

import json
import math
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import nanscan
from helpers import cases
from helpers.models import INF, NAN
from nanscan import NonFiniteError


@pytest.fixture
def mixed(device):
    return torch.tensor([[1.0, -3.0, NAN, INF], [-INF, 0.5, -INF, 2.0]], device=device)


def test_attributes(mixed):
    result = nanscan.check(mixed)
    assert (result.shape, result.dtype, result.numel, result.calls) == ((2, 4), torch.float32, 8, 1)
    assert (result.nan_count, result.posinf_count, result.neginf_count) == (1, 1, 2)
    assert (result.inf_count, result.nonfinite_count) == (3, 4)
    assert (result.min, result.max, result.absmax) == (-3.0, 2.0, 3.0)
    assert result.first_nonfinite == (0, 2)
    assert result.is_finite is False
    assert result.ready() is True


def test_moments(mixed):
    result = nanscan.check(mixed, moments=True)
    finite = np.array([1.0, -3.0, 0.5, 2.0])
    assert result.mean == pytest.approx(finite.mean())
    assert result.rms == pytest.approx(np.sqrt((finite**2).mean()))
    assert result.std == pytest.approx(finite.std())
    assert result.zero_count == result.subnormal_count == 0
    zeros = torch.tensor([0.0, -0.0, 1e-40, 1.0], device=mixed.device)
    result = nanscan.check(zeros, moments=True)
    assert (result.zero_count, result.subnormal_count) == (2, 1)


@pytest.mark.parametrize("name", ["mean", "std", "rms", "zero_count", "subnormal_count"])
def test_moments_not_asked_for(mixed, name):
    with pytest.raises(AttributeError, match=r"check\(x, moments=True\)"):
        getattr(nanscan.check(mixed), name)


def test_the_standard_deviation_of_a_constant_is_zero():
    assert nanscan.check(torch.full((1000,), 0.1), moments=True).std == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("moments", [False, True])
def test_repr_and_to_dict_show_every_value(mixed, moments):
    result = nanscan.check(mixed, moments=moments)
    values = result.to_dict()
    assert json.loads(json.dumps(values)) == {**values, "first_nonfinite": [0, 2]}
    assert values["dtype"] == "float32"
    assert values["shape"] == [2, 4]
    assert ("mean" in values) == ("subnormal_count" in values) == moments
    text = repr(result)
    assert text.startswith("ScanResult(float32 [2, 4], ")
    for name in values.keys() - {"dtype", "shape"}:
        assert values[name] == getattr(result, name)
        assert f"{name}={values[name]!r}" in text


def test_truth_is_refused(mixed):
    with pytest.raises(TypeError, match=r"read \.is_finite"):
        bool(nanscan.check(mixed))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 5)], ids=str)
@cases.each_dtype
def test_empty(dtype, shape, device):
    result = nanscan.check(torch.empty(shape, dtype=dtype, device=device), moments=True)
    assert result.shape == shape
    assert result.numel == result.nonfinite_count == result.zero_count == 0
    assert result.is_finite
    assert result.min is result.max is result.absmax is result.first_nonfinite is None
    assert result.mean is result.std is result.rms is None
    assert json.dumps(result.to_dict())


def test_zero_dim(device):
    result = nanscan.check(torch.tensor(NAN, device=device))
    assert result.first_nonfinite == ()
    assert result.min is result.max is result.absmax is None
    assert nanscan.check(torch.tensor(-2.5, device=device)).absmax == 2.5


def test_negative_zero_is_kept():
    result = nanscan.check(torch.tensor([0.0, -0.0]))
    assert (math.copysign(1, result.min), math.copysign(1, result.max)) == (-1, 1)
    assert math.copysign(1, result.absmax) == 1


def test_complex_counts_parts_and_indexes_elements(device):
    x = torch.tensor([[1 + 1j, 2 + 0j], [complex(3, NAN), complex(INF, NAN)]], device=device)
    result = nanscan.check(x)
    assert (result.numel, result.nan_count, result.posinf_count) == (8, 2, 1)
    assert result.first_nonfinite == (1, 0)
    assert (result.min, result.max) == (0.0, 3.0)


def test_autograd_modes_change_nothing():
    x = torch.tensor([1.0, NAN, -2.0])
    expected = cases.fields(nanscan.check(x))
    parameter = torch.nn.Parameter(x)
    assert cases.fields(nanscan.check(x.requires_grad_())) == expected
    assert cases.fields(nanscan.check(parameter)) == expected
    assert cases.fields(nanscan.check(x * 1)) == expected
    with torch.no_grad():
        assert cases.fields(nanscan.check(x)) == expected
    with torch.inference_mode():
        assert cases.fields(nanscan.check(x)) == expected
        assert cases.fields(nanscan.check(x.clone())) == expected


@pytest.fixture
def flush_denormal():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode that torch can set")
    torch.set_flush_denormal(False)
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("larger", ["min", "max"])
@cases.each_real_dtype
def test_flushing_denormals_changes_nothing(dtype, larger, flush_denormal):
    patterns = cases.Patterns(dtype)
    small, large = 1, (1 << cases.FORMATS[dtype].mantissa) - 1
    low, high = (large, small) if larger == "min" else (small, large)
    x = cases.from_bits([high, low | patterns.sign, 0, patterns.bad[0]] * 300, dtype)
    expected = [cases.decode(bits, dtype) for bits in (low | patterns.sign, high, large)]
    flush_denormal(True)
    result = nanscan.check(x, moments=True)
    extremes = [result.min, result.max, result.absmax]
    flush_denormal(False)
    assert extremes == expected
    assert (result.subnormal_count, result.zero_count, result.nan_count) == (600, 300, 300)


@cases.each_dtype
def test_the_number_of_threads_changes_nothing(dtype, num_threads):
    x = cases.buffer(dtype, cases.Content(), (3 << 20) // dtype.itemsize)
    cases.plant(x, x.numel() // 2, cases.Patterns(cases.real_dtype(dtype)).nans[0])
    results = []
    for count in (1, 2, 5):
        num_threads(count)
        results.append(cases.fields(nanscan.check(x)))
    assert results[0]["nan_count"] == 1
    assert all(result == results[0] for result in results)


def test_more_logical_elements_than_32_bits_count():
    x = torch.tensor([[1.0], [NAN]]).expand(2, 1 << 32)
    result = nanscan.check(x)
    assert (result.numel, result.nan_count, result.first_nonfinite) == (1 << 33, 1 << 32, (1, 0))
    x = torch.tensor([2.0, -INF, 1.0]).expand(1 << 31, 5, 3)
    result = nanscan.check(x, moments=True)
    assert (result.numel, result.neginf_count) == (15 << 31, 5 << 31)
    assert (result.mean, result.first_nonfinite) == (1.5, (0, 0, 1))


def test_more_stored_elements_than_31_bits_index():
    size = (1 << 31) + 4099
    if (
        hasattr(os, "sysconf")
        and os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 2 * size
    ):
        pytest.skip("needs 4 GiB of free memory")
    integers = torch.zeros(size, dtype=torch.uint8)
    integers[[1 << 31, size - 1]] = 0x7F
    result = nanscan.check(integers.view(torch.float8_e4m3fn))
    assert (result.numel, result.nan_count, result.first_nonfinite) == (size, 2, (1 << 31,))
    assert (result.min, result.max) == (0.0, 0.0)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_check_many_keeps_the_structure():
    good, bad = torch.ones(2), torch.tensor([1.0, NAN])
    tree = {"a": [good, None], "b": (bad, {"c": Pair(good, [bad])}), "d": []}
    result = nanscan.check_many(tree)
    assert isinstance(result["b"][1]["c"], Pair)
    assert result["a"][1] is None
    assert result["d"] == []
    assert type(result["b"]) is tuple
    assert result["a"][0].is_finite
    assert result["b"][0].first_nonfinite == result["b"][1]["c"].right[0].first_nonfinite == (1,)
    assert result["b"][1]["c"].left.is_finite


def test_check_many_of_one_tensor_and_of_nothing():
    assert nanscan.check_many(torch.ones(3)).numel == 3
    assert nanscan.check_many([]) == []
    assert nanscan.check_many(None) is None


def test_check_many_takes_moments():
    assert nanscan.check_many([torch.ones(3)], moments=True)[0].mean == 1.0


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [torch.ones(2), 3]}, "['a'][1]"),
        ((torch.ones(2), {"k": torch.ones(2, dtype=torch.int32)}), "[1]['k']"),
        (Pair(torch.ones(2), "text"), ".right"),
        (7, "the root"),
    ],
    ids=["list", "dict", "namedtuple", "root"],
)
def test_check_many_names_the_wrong_leaf(tree, where):
    with pytest.raises(TypeError) as error:
        nanscan.check_many(tree)
    assert str(error.value).endswith(f"(at {where})")


def test_check_many_names_a_leaf_without_data():
    with pytest.raises(ValueError, match=r"meta device \(at \[0\]\)"):
        nanscan.check_many([torch.ones(2, device="meta")])


def test_assert_finite(mixed):
    assert nanscan.assert_finite(torch.ones(3, device=mixed.device)) is None
    assert nanscan.assert_finite(torch.empty(0, device=mixed.device)) is None
    with pytest.raises(NonFiniteError) as error:
        nanscan.assert_finite(mixed, "logits")
    assert str(error.value) == (
        "nanscan: logits is not finite: 1 NaN, 1 +Inf, 2 -Inf of 8 (float32 [2, 4]), "
        "first at (0, 2), finite values from -3 to 2"
    )
    assert isinstance(error.value, FloatingPointError)
    assert cases.fields(error.value.result) == cases.fields(nanscan.check(mixed))
    assert error.value.finding is None


def test_assert_finite_without_a_name_or_a_finite_value():
    with pytest.raises(NonFiniteError) as error:
        nanscan.assert_finite(torch.tensor(NAN))
    assert str(error.value) == (
        "nanscan: tensor is not finite: 1 NaN of 1 (float32 []), first at (), no finite value"
    )


def freed():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def quantised():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


WRONG = {
    "int64": (
        lambda: torch.ones(2, dtype=torch.int64),
        TypeError,
        "a floating-point tensor, got torch.int64",
    ),
    "bool": (
        lambda: torch.ones(2, dtype=torch.bool),
        TypeError,
        "a floating-point tensor, got torch.bool",
    ),
    "quantised": (quantised, TypeError, "a floating-point tensor, got torch.quint8"),
    "sparse int": (
        lambda: torch.ones(2).int().to_sparse(),
        TypeError,
        "floating-point tensor, got torch.int32",
    ),
    "numpy": (lambda: np.ones(2), TypeError, "expected a torch.Tensor, got numpy.ndarray"),
    "None": (lambda: None, TypeError, "expected a torch.Tensor, got NoneType"),
    "float": (lambda: 1.0, TypeError, "expected a torch.Tensor, got float"),
    "class": (lambda: torch.Tensor, TypeError, "expected a torch.Tensor, got torch._C._TensorMeta"),
    "list": (lambda: [torch.ones(2)], TypeError, "got list; .*check_many"),
    "dict": (dict, TypeError, "got dict; .*check_many"),
    "float8_e8m0fnu": (
        lambda: torch.ones(2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        TypeError,
        "no kernel for torch.float8_e8m0fnu; supported are float16, ",
    ),
    "meta": (
        lambda: torch.ones(2, device="meta"),
        ValueError,
        "with data, got one on the meta device",
    ),
    "freed": (freed, ValueError, r"with data, got one of shape \[4\] whose storage is freed"),
    "fake": (fake, TypeError, "cannot scan this .*FakeTensor: it is a tensor subclass"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), TypeError, "its layout is torch._mkldnn"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates quantised tensors
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    make, kind, message = WRONG[name]
    x = make()
    with pytest.raises(kind, match=message) as error:
        nanscan.check(x)
    assert str(error.value).startswith("nanscan: ")
    with pytest.raises(kind, match=message):
        nanscan.assert_finite(x)


@pytest.mark.parametrize(
    "transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())]
)
def test_torch_func_transforms_are_refused(transform):
    def checked(x):
        nanscan.check(x)
        return x

    with pytest.raises(TypeError, match=r"inside a torch\.func transform, which hides its values"):
        transform(checked)(torch.ones(3, 2))


SPARSE = {
    "coo": lambda x: x.to_sparse(),
    "coo, not coalesced": lambda x: torch.sparse_coo_tensor([[0, 0], [1, 1]], [NAN, 4.0], (3, 3)),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "coo with grad": lambda x: x.requires_grad_().to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch calls CSR a beta
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_scans_the_stored_values(name):
    result = nanscan.check(SPARSE[name](torch.tensor([[0, NAN, 0], [0, 4.0, 0], [0, 0, 0]])))
    assert (result.numel, result.nan_count, result.min, result.max) == (2, 1, 4.0, 4.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(layout):
    parts = [torch.tensor([1.0, NAN]), torch.tensor([3.0, 4.0, -5.0])]
    result = nanscan.check(torch.nested.nested_tensor(parts, layout=layout))
    assert (result.numel, result.nan_count, result.min, result.max) == (5, 1, -5.0, 4.0)


class Plain(torch.Tensor):
    """A subclass over its own memory."""


class Logging(torch.Tensor):
    """A subclass that would record, and fail on, any torch function that a scan calls on it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"a scan called {func}")


@pytest.mark.parametrize("kind", [Plain, Logging])
def test_plain_subclass(kind):
    x = torch.tensor([1.0, NAN]).as_subclass(kind)
    row = cases.fields(nanscan.check(torch.tensor([1.0, NAN])))
    assert cases.fields(nanscan.check(x)) == row


class Wrapper(torch.Tensor):
    """A wrapper with `__tensor_flatten__`, and no memory of its own."""

    @staticmethod
    def __new__(cls, **inner):
        first = next(iter(inner.values()))
        self = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32)
        self.__dict__.update(inner)
        self.parts = list(inner)
        return self

    def __tensor_flatten__(self):
        return self.parts, None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"a scan called {func}")


def test_wrapper_subclass_is_unwrapped():
    x = Wrapper(scale=torch.tensor([1.0, INF]), ids=torch.tensor([1, 2]))
    result = nanscan.check(x)
    assert (result.numel, result.posinf_count, result.first_nonfinite) == (2, 1, (1,))
    assert nanscan.check(Wrapper(outer=x)).posinf_count == 1


def test_wrapper_subclass_with_several_or_no_parts():
    with pytest.raises(TypeError, match=r"several or no floating-point parts \(a, b\)"):
        nanscan.check(Wrapper(a=torch.ones(1), b=torch.ones(1)))
    with pytest.raises(TypeError, match=r"several or no floating-point parts \(none\)"):
        nanscan.check(Wrapper(ids=torch.tensor([1])))


def test_conjugate_and_negative_views_report_the_values_seen():
    x = torch.tensor([complex(1, 2), complex(INF, INF)])
    result = nanscan.check(x.conj())
    assert (result.posinf_count, result.neginf_count, result.min, result.max) == (1, 1, -2.0, 1.0)
    result = nanscan.check(x.conj().imag)
    assert (result.posinf_count, result.neginf_count, result.max) == (0, 1, -2.0)
    assert result.first_nonfinite == (1,)
