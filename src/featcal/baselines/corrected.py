"""A merged model with its adapters: scores by task, candidates for `featcal.evaluate`, and a folder to keep them in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..blocks import call_model
from ..drift.outputs import logits_of
from ..errors import InputError, nearest
from ..evaluate.checkpoints import load_model
from ..evaluate.heads import Head, OwnHead
from ..evaluate.run import Adapted, Candidate
from ..evaluate.scorers import adapted
from ..hub import locate
from ..reader import open_checkpoint
from ..version import __version__
from ..writer import atomic_write, write_safetensors
from .modules import METHODS, Correction, DeepSurgery

ADAPTERS, CONFIG = "adapters.safetensors", "config.json"


@dataclass
class Corrected:
    """A merged model and one adapter per task. `facts` are kept in the folder's config."""

    method: str
    model: nn.Module
    adapters: Mapping[str, Correction]
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inside: dict[str, nn.Module] = {}

    @property
    def parameters(self) -> int:
        """Extra parameters at inference, of all tasks together."""
        return sum(adapter.used for adapter in self.adapters.values())

    def candidate(self, task: str) -> Adapted:
        """What `featcal.evaluate` scores on a task. It shares the merged model's weights.

        Raises:
            InputError: no adapter was trained for the task.
        """
        if task not in self.adapters:
            raise InputError(f"no adapter for task '{task}'{nearest(task, self.adapters)}; there are: "
                             f"{', '.join(self.adapters)}")  # fmt: skip
        adapter = self.adapters[task]
        if not isinstance(adapter, DeepSurgery):
            return Adapted(self.model, self.adapters)
        if task not in self._inside:
            self._inside[task] = shared_copy(self.model)
            adapter.insert(self._inside[task])
        return Adapted(self._inside[task], {task: adapter.final})

    def logits(self, batch: Any, task: str, head: Head | None = None) -> Tensor:
        """Scores of a batch by the task's corrected features: the head's, or the model's own.

        Raises:
            InputError: no adapter for the task, or neither a head nor an output layer of the model's own.
        """
        one = self.candidate(task)
        adapter = one.adapters[task]
        with torch.no_grad():
            if head is not None and not isinstance(head, OwnHead):
                return head.scores(adapter(head.features(one.model, batch)))
            device = next(one.model.parameters()).device
            with adapted(one.model, adapter):
                found = logits_of(call_model(one.model, batch, device))
        assert found is not None, "a model with an output layer gives scores"
        return found

    def save(self, folder: Path, merged: str, fingerprint: str | None = None) -> None:
        """Write `adapters.safetensors` and `config.json`.

        Args:
            merged: where the merged model is: a reference, or a path relative to the folder that starts with `./`.
            fingerprint: of that checkpoint, so that adapters are never put on another one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        states = {task: adapter.state_dict() for task, adapter in self.adapters.items()}
        tensors = {f"{task}/{name}": value for task, state in states.items() for name, value in state.items()}
        write_safetensors(folder / ADAPTERS, tensors)
        config = {
            "featcal_baseline": self.method,
            "version": __version__,
            "merged": merged,
            "merged_fingerprint": fingerprint,
            "class": type(self.model).__name__,
            "tasks": list(self.adapters),
            "blocks": next((a.order for a in self.adapters.values() if isinstance(a, DeepSurgery)), []),
            "parameters": self.parameters,
            **self.facts,
        }
        with atomic_write(folder / CONFIG) as file:
            file.write((json.dumps(config, indent=1) + "\n").encode())


def is_corrected(ref: str | Path) -> bool:
    """Whether a reference is a folder of adapters."""
    path = Path(ref) / CONFIG
    return path.is_file() and (Path(ref) / ADAPTERS).is_file() and "featcal_baseline" in path.read_text()


def load_corrected(folder: str | Path) -> Corrected:
    """The merged model with the adapters of a folder that `Corrected.save` has written.

    Raises:
        InputError: it is not such a folder, is damaged, or the merged model is gone or has changed since.
    """
    folder = Path(folder)
    if not is_corrected(folder):
        raise InputError(f"{folder} is not a folder of adapters ({ADAPTERS} and {CONFIG})")
    config = json.loads((folder / CONFIG).read_text())
    ref = config["merged"]
    place = str(folder / ref) if ref.startswith("./") else ref
    known = config["merged_fingerprint"]
    if known is not None and open_checkpoint(locate(place)).fingerprint() != known:
        raise InputError(f"the merged model {place} is not the one that the adapters in {folder} were trained on")
    import transformers

    model = load_model(place, kind=getattr(transformers, config["class"], None))
    adapters = _load_adapters(folder / ADAPTERS, config)
    named = ("featcal_baseline", "version", "merged", "merged_fingerprint", "class", "tasks", "blocks", "parameters")
    return Corrected(
        config["featcal_baseline"], model, adapters, {key: value for key, value in config.items() if key not in named}
    )


def open_candidates(ref: str | Path, *, base: str | Path | None = None) -> tuple[nn.Module, Callable[[str], Candidate]]:
    """The model that a reference means, and what is scored of it on a task.

    That is the model itself, or, for a folder of adapters, the merged model with the task's adapter.

    Args:
        base: folder of the base, for a PEFT adapter alone.
    """
    if is_corrected(ref):
        corrected = load_corrected(ref)
        return corrected.model, corrected.candidate
    model = load_model(ref, base=base)
    return model, lambda task: model


def _load_adapters(file: Path, config: Mapping[str, Any]) -> dict[str, Correction]:
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise InputError(f"{file} is damaged ({error}); train the adapters again") from error
    adapters = {}
    for task in config["tasks"]:
        state = {key.rpartition("/")[2]: t for key, t in tensors.items() if key.rpartition("/")[0] == task}
        adapter = _empty(config["featcal_baseline"], config["blocks"], state)
        adapter.load_state_dict(state)
        adapters[task] = adapter.requires_grad_(False)
    return adapters


def _empty(method: str, blocks: list[str], state: Mapping[str, Tensor]) -> Correction:
    """An adapter of the sizes of a saved one."""
    if method == "surgery_v2":
        rank, width = state["final.down_HD"].shape
        widths = [state[f"layers.{i}.down_HD"].shape[1] for i in range(len(blocks))]
        return DeepSurgery(blocks, widths, width, rank)
    rank, width = state["down_HD"].shape
    return METHODS[method](width, rank)


def shared_copy(model: nn.Module) -> nn.Module:
    """A model of its own modules (and hooks) with the very same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
