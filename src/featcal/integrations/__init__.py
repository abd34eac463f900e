"""featcal inside other tools. Each module here needs its tool installed."""
