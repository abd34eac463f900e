"""Task scores of models in memory: classification, text-to-text, causal LMs; agreement with experts without labels.

task = EvalTask("cars", Classification(ImageReader(processor), head), rows)
scores = evaluate({"expert": expert, "merged": merged, "calibrated": calibrated}, task, expert="expert")
scores["merged"]["accuracy"]        # Score(metric='accuracy', value=55.7, n=8041, low=54.6, high=56.8)
"""

from .checkpoints import load_model
from .classes import class_names
from .harness import HarnessTask, run_harness
from .heads import CentroidHead, Head, OwnHead, ZeroShotHead, load_centroid_head, save_centroid_head, zero_shot_head
from .outcomes import METRICS, Score, average, score
from .readers import ImageReader, PromptReader, TextReader
from .recipe import evaluate_recipe
from .rows import TableRows
from .run import Adapted, EvalTask, choose_rows, evaluate, predict, score_predictions
from .scorers import Classification, Generation, Likelihood, Scorer
from .table import main_scores, score_table, scores_to_dict, write_scores

__all__ = [
    "METRICS",
    "Adapted",
    "CentroidHead",
    "Classification",
    "EvalTask",
    "Generation",
    "HarnessTask",
    "Head",
    "ImageReader",
    "Likelihood",
    "OwnHead",
    "PromptReader",
    "Score",
    "Scorer",
    "TableRows",
    "TextReader",
    "ZeroShotHead",
    "average",
    "choose_rows",
    "class_names",
    "evaluate",
    "evaluate_recipe",
    "load_centroid_head",
    "load_model",
    "main_scores",
    "predict",
    "run_harness",
    "save_centroid_head",
    "score",
    "score_predictions",
    "score_table",
    "scores_to_dict",
    "write_scores",
    "zero_shot_head",
]
