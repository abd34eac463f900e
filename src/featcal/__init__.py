"""featcal: calibrate a merged model toward its experts, layer by layer, in closed form."""

__version__ = "0.1.0"
