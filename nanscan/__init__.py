"""Finds the layer, the tensor and the step in which a PyTorch model first went NaN or Inf."""

from nanscan._errors import NonFiniteError, NonFiniteWarning
from nanscan._scan import ScanResult, assert_finite, check, check_many

__version__ = "0.1.0"

__all__ = [
    "NonFiniteError",
    "NonFiniteWarning",
    "ScanResult",
    "assert_finite",
    "check",
    "check_many",
]
