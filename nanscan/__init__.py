"""Finds the layer, the tensor and the step in which a PyTorch model first went NaN or Inf."""

from nanscan._errors import NonFiniteError, NonFiniteWarning
from nanscan._judge import Cause, Finding
from nanscan._locate import Locating, locate, locating, replay
from nanscan._location import Location, Op, Operand
from nanscan._monitor import Monitor, disable, enable, probe, watch
from nanscan._save import Saved, load_saved
from nanscan._scan import ScanResult, assert_finite, check, check_many
from nanscan._sites import Site

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
