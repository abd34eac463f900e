"""Post-merge baselines: per task a small adapter on the merged model's features, trained toward the expert's.

adapters = train_surgery("surgery", merged, experts, data)        # {task: module}
corrected = Corrected("surgery", merged, adapters)
corrected.logits(batch, "cars")                                   # the task has to be known at inference

They stay in the inference path, unlike FeatCal's update. `docs/baselines.md` has formulas, defaults and sources.
"""

from .corrected import Corrected, load_corrected, open_candidates
from .modules import METHODS, Correction, DeepSurgery, ProbSurgery, Surgery
from .train import Trained, Training, train_surgery

__all__ = [
    "METHODS",
    "Corrected",
    "Correction",
    "DeepSurgery",
    "ProbSurgery",
    "Surgery",
    "Trained",
    "Training",
    "load_corrected",
    "open_candidates",
    "train_surgery",
]
