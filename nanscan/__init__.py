"""Finds the layer, the tensor and the step in which a PyTorch model first went NaN or Inf."""

from nanscan._api import disable, enable, probe, watch
from nanscan._collect.coverage import Coverage
from nanscan._data.cause import Cause
from nanscan._data.errors import NonFiniteError, NonFiniteWarning
from nanscan._data.finding import Finding, Located
from nanscan._data.location import Location, Op, Operand
from nanscan._data.result import BadCall, ScanResult
from nanscan._data.site import Kind, Site
from nanscan._locate.api import locate, locating
from nanscan._locate.search import Locating
from nanscan._monitor import Monitor
from nanscan._output.save import Saved, load_saved
from nanscan._output.sinks import Sink
from nanscan._replay import replay
from nanscan._scan.check import assert_finite, check, check_many
from nanscan._version import __version__

__all__ = [
    "BadCall",
    "Cause",
    "Coverage",
    "Finding",
    "Kind",
    "Located",
    "Locating",
    "Location",
    "Monitor",
    "NonFiniteError",
    "NonFiniteWarning",
    "Op",
    "Operand",
    "Saved",
    "ScanResult",
    "Sink",
    "Site",
    "__version__",
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

for _name in __all__:  # errors, pickles and help name the package, so files can move
    if _name != "__version__":
        globals()[_name].__module__ = __name__
del _name
