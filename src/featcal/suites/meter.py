"""What a stretch of work costs: time, peak memory of the process and its children, energy of the GPU."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil
import torch

INTERVAL = 0.2
"""Seconds between looks at memory and power."""


@dataclass
class Meter:
    """A context that measures what happens inside it.

    Energy needs an NVIDIA GPU and nvidia-ml-py: the difference of the driver's energy counter, or, on GPUs without one,
    the sum of power over the samples. It counts everything that ran on that GPU meanwhile, idle power included.
    """

    device: torch.device
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    """Largest sum over the process and its children, sampled."""
    peak_device_bytes: int | None = None
    """Largest allocation by torch on a CUDA device."""
    watt_hours: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Meter:
        self._synchronise()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._gpu = _Gpu.find(self.device)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._synchronise()
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()
        self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss())
        if self.device.type == "cuda":
            self.peak_device_bytes = torch.cuda.max_memory_allocated(self.device)
        if self._gpu is not None:
            self.watt_hours = self._gpu.finish()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak_rss_bytes = max(self.peak_rss_bytes, tree_rss())
            if self._gpu is not None:
                self._gpu.sample()


def tree_rss() -> int:
    """Resident bytes of this process and all its children."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


class _Gpu:
    """The energy meter of one NVIDIA GPU."""

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self._joules, self._last = 0.0, time.perf_counter()
        self._counter: int | None = None
        try:
            self._counter = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError:
            self._counter = None  # older GPUs have no counter

    @classmethod
    def find(cls, device: torch.device) -> _Gpu | None:
        """The meter of a CUDA device; None without one, or without nvidia-ml-py."""
        if device.type != "cuda":
            return None
        try:
            import pynvml
        except ImportError:
            return None
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"))

    def sample(self) -> None:
        now = time.perf_counter()
        self._joules += self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000 * (now - self._last)
        self._last = now

    def finish(self) -> float:
        """Watt-hours since the start."""
        if self._counter is None:
            self.sample()
            return self._joules / 3600
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._counter) / 3.6e6
