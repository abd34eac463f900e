"""The command line in processes of its own, which may be killed: forked from a parent that has imported everything.

A fresh interpreter would need seconds for its imports; these start at once and are real processes all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import featcal.cli
import featcal.run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["featcal.cli", "featcal.run", "featcal.show"]
    + [f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "t5")]
)
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
TIMEOUT = 120


@dataclass
class Doom:
    """When a child dies.

    Args:
        folder: only changes below it count.
        name: only changes of files of this name count.
        at: the number of the change to the file system right before which the process kills itself; 0: never.
        trace: file that takes a line for each change.
        largest: bytes that a file may have; the system kills the process inside the write that goes beyond.
    """

    folder: Path
    at: int = 0
    name: str = ""
    trace: Path | None = None
    largest: int = 0

    def cast(self) -> None:
        if self.largest:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest, self.largest))
        root, count = str(self.folder), 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event == "open":
                path, mode = arguments[0], arguments[1]
                if mode is None or not set(mode) & set("wax+"):
                    return
            elif event in CHANGES:
                path = arguments[0]
            else:
                return
            if not isinstance(path, (str, Path)) or not str(path).startswith(root) or str(path) == str(self.trace):
                return
            if self.name and Path(path).name != self.name:
                return
            count += 1
            if self.trace:
                with open(self.trace, "a") as file:
                    file.write(f"{event} {Path(path).name}\n")
            if count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)


@dataclass
class Child:
    """A command on its way."""

    process: BaseProcess
    log: Path

    def status(self, timeout: float = TIMEOUT) -> int:
        """The exit status; negative for a signal. A child that hangs is killed and fails the test."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"no end after {timeout} s:\n{self.text}")
        return self.process.exitcode

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text() if self.log.exists() else ""


def command(
    arguments: Sequence[str | Path],
    log: Path,
    *,
    doom: Doom | None = None,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Child:
    """Start `featcal ARGUMENTS`; what it prints goes to `log`. `before` runs in the child first."""
    words = [str(argument) for argument in arguments]
    process = CONTEXT.Process(target=_run, args=(words, log, doom, dict(environment or {}), before))
    process.start()
    return Child(process, log)


def ranks(arguments: Sequence[str | Path], log: Path, world: int, **options: Any) -> list[Child]:
    """The same command as `world` processes of one job, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    return [
        command(
            arguments,
            log.with_name(f"{log.name}-{rank}"),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{name: option(rank) for name, option in options.items()},
        )
        for rank in range(world)
    ]


def without_pictures(module: Any) -> None:
    """Leave an empty report.html: drawing it takes longer than calibrating a pico model."""
    module.write_report = lambda folder: (folder / "report.html").write_text("")


def _run(
    words: list[str],
    log: Path,
    doom: Doom | None,
    environment: dict[str, str],
    before: Callable[[], None] | None,
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["featcal", *words]
    without_pictures(sys.modules["featcal.run"])
    if before:
        before()
    if doom:
        doom.cast()
    featcal.cli.main()
