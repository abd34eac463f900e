"""`featcal merge`: only the upstream merge of a recipe, as a folder that loads like the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dist import process_group
from ..output import RESOLVED, hold
from ..plan import Plan
from ..recipe import Recipe, load_recipe, recipe_to_yaml
from ..writer import OutputFolder, atomic_write
from .folder import fingerprint, make_merge, method_of, prepare_merge


@dataclass
class Merged:
    """What a merge leaves behind."""

    output: Path
    method: str
    notes: list[str] = field(default_factory=list)
    """What a user should know, e.g. tensors that keep the base's value."""
    seconds: float = 0.0


def merge(
    recipe: Recipe | str | Path,
    output: str | Path,
    *,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    fresh: bool = False,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Merged:
    """Carry out a recipe's `merged: {method: …}` into the folder `output`.

    The same call goes on after an interruption, as far as the method allows (`docs/mergers.md`). Under torchrun the
    first process does all the work.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: `dotted.key=value` each, for a recipe file.
        overwrite: replace a non-empty output.
        fresh: forget an interrupted merge instead of going on with it.
        tokenizer: folder of the tokenizer or image processor, when no model brings one.
        trust_remote_code: allow modelling code that a checkpoint brings along.

    Raises:
        InputError: anything wrong with the recipe, the models, the data or the output.
        RunError: no space, or a merged tensor that overflows.
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    with process_group() as comm:

        def work() -> dict[str, Any]:
            if comm.rank:
                return {}
            plan = prepare_merge(chosen, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            return _merge_into(plan, output, chosen, overwrite, fresh, progress)

        made = comm.share_object(comm.together(work))
    return Merged(Path(output), method_of(chosen).method, made["notes"], made["seconds"])


def _merge_into(
    plan: Plan, output: str | Path, recipe: Recipe, overwrite: bool, fresh: bool, progress: bool
) -> dict[str, Any]:
    OutputFolder(output, overwrite=overwrite)  # an interrupted merge has no say in whether OUT may be replaced
    with hold(plan, output, overwrite) as place:
        if fresh:
            place.start_over()
        made = make_merge(plan, place, fingerprint(plan), progress=progress)
        with atomic_write(place.out / RESOLVED) as file:
            file.write(recipe_to_yaml(recipe).encode())
        place.publish()
    return made
