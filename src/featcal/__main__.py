"""`python -m featcal`, and so `torchrun -m featcal`."""

from .cli import main

main()
