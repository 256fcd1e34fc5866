"""Finds the layer, the tensor and the step in which a PyTorch model first went NaN or Inf."""

from nanscan._data.cause import Cause
from nanscan._data.errors import NonFiniteError, NonFiniteWarning
from nanscan._data.finding import Finding
from nanscan._data.location import Location, Op, Operand
from nanscan._data.result import ScanResult
from nanscan._data.site import Site
from nanscan._locate.api import locate, locating
from nanscan._locate.search import Locating
from nanscan._monitor import Monitor, disable, enable, probe, watch
from nanscan._output.save import Saved, load_saved
from nanscan._replay import replay
from nanscan._scan.check import assert_finite, check, check_many

__version__ = "0.1.0"

__all__ = [
    "Cause",
    "Finding",
    "Locating",
    "Location",
    "Monitor",
    "NonFiniteError",
    "NonFiniteWarning",
    "Op",
    "Operand",
    "Saved",
    "ScanResult",
    "Site",
    "assert_finite",
    "check",
    "check_many",
    "disable",
    "enable",
    "load_saved",
    "locate",
    "locating",
    "probe",
    "replay",
    "watch",
]
