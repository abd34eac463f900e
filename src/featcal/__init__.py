"""featcal: calibrate a merged model toward its experts, layer by layer, in closed form."""

from .api import Result, calibrate
from .errors import InputError, RunError
from .run import Outcome, run
from .settings import PRESETS, Calibration
from .version import __version__

# `calibrate` and `run` are also modules of this package. Importing a module puts it under its name here, once; the
# functions above come after that, and so win for good.
__all__ = [
    "PRESETS",
    "Calibration",
    "InputError",
    "Outcome",
    "Result",
    "RunError",
    "__version__",
    "calibrate",
    "run",
]
