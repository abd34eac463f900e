"""featcal: calibrate a merged model toward its experts, layer by layer, in closed form."""

from .api import Result, calibrate
from .errors import InputError, RunError
from .run import Outcome, run
from .settings import PRESETS, Calibration
from .version import __version__

__all__ = ["PRESETS", "Calibration", "InputError", "Outcome", "Result", "RunError", "calibrate", "run"]
