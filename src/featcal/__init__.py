"""featcal: calibrate a merged model toward its experts, layer by layer, in closed form."""

from .api import Result, calibrate
from .errors import InputError, RunError
from .settings import PRESETS, Calibration

__version__ = "0.1.0"
__all__ = ["PRESETS", "Calibration", "InputError", "Result", "RunError", "calibrate"]
