"""What the commands are given: a recipe file, or a merged model with flags. Either way a recipe comes out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .discover import Discovery, find, parse_pairs
from .errors import InputError
from .provenance import prove
from .recipe import Recipe, load_recipe

logger = logging.getLogger("featcal")


@dataclass(frozen=True)
class Given:
    """The arguments of a command that starts from either."""

    source: str
    overrides: Sequence[str] = ()
    data: Sequence[str] = ()
    base: str | None = None
    experts: Sequence[str] = ()
    check_origin: bool = True
    trust_remote_code: bool = False

    @property
    def is_model(self) -> bool:
        """Whether `source` is a merged model: a folder, a weight file, or with flags that only suit one a Hub id."""
        path = os.path.expanduser(self.source)
        if os.path.isfile(path):
            return path.endswith(".safetensors")
        return os.path.isdir(path) or bool(self.data or self.experts or self.base)

    def recipe(self) -> Recipe:
        """The recipe, with a word on where its models were found.

        Raises:
            InputError: see `load_recipe`, `discover.find` and `provenance.prove`.
        """
        if not self.is_model:
            return self._from_file()
        found = self.discover()
        logger.info("base %s; experts %s (from %s)", *_summary(found))
        for note in found.notes:
            logger.info("%s", note)
        if proof := self.proof(found):
            logger.info("%s", proof)
        return found.recipe

    def discover(self) -> Discovery:
        """Base and experts of the merged model."""
        data = parse_pairs(self.data, "--data", "SOURCE")
        experts = parse_pairs(self.experts, "--expert", "MODEL")
        return find(self.source, data, self.base, experts, self.overrides)

    def proof(self, found: Discovery) -> str:
        """One sentence on whether the merged model was made of them; empty when it is not to be checked."""
        return prove(found, trust_remote_code=self.trust_remote_code).text if self.check_origin else ""

    def _from_file(self) -> Recipe:
        flags = {"--data": self.data, "--expert": self.experts, "--base": self.base}
        used = [flag for flag, value in flags.items() if value]
        if used:
            raise InputError(
                f"{used[0]} goes with a merged model; {self.source} is a recipe, which names all by itself"
            )
        return load_recipe(self.source, self.overrides)


def _summary(found: Discovery) -> tuple[str, str, str]:
    experts = ", ".join(f"{task} = {spec.expert}" for task, spec in found.recipe.tasks.items())
    return found.recipe.base, experts, found.origin
