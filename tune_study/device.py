"""Which device a trial runs on, and what it can do there."""

from __future__ import annotations

import platform

import torch

from tune_study.concurrency import cores
from tune_study.config import ConfigError, TrialConfig


def resolve(name: str) -> str:
    """`auto` to the best device here (mps, else cuda, else cpu); others as they are.

    Raises:
        ConfigError: for a device that this machine does not have.
    """
    available = {
        "mps": torch.backends.mps.is_available(),
        "cuda": torch.cuda.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return next(device for device, present in available.items() if present)
    if not available[name]:
        here = ", ".join(device for device, present in available.items() if present)
        raise ConfigError(f"device = {name!r}: not on this machine. Give 'auto' or one of: {here}.")
    return name


def settle(config: TrialConfig) -> TrialConfig:
    """The config with device and threads as they are on this machine: no `auto`, no 0.

    Raises:
        ConfigError: for a device or precision that this machine does not have.
    """
    device = resolve(config.device)
    check_precision(device, config.precision)
    return config.replace(device=device, threads=config.threads or cores())


def check_precision(device: str, precision: str) -> None:
    """Refuses bf16 where the device has no bfloat16 arithmetic.

    Raises:
        ConfigError: naming the device.
    """
    if precision != "bf16":
        return
    supported = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_bf16_supported,
        "mps": lambda: torch.backends.mps.is_macos_or_newer(14, 0),
    }
    if not supported[device]():
        raise ConfigError(f"precision = 'bf16': {device} here has no bfloat16. Give 'fp32'.")


def describe(device: str) -> str:
    """The device's name for the records, such as `cuda (NVIDIA H200)` or `cpu (x86_64, AVX512)`.

    Of a CPU also the instructions that PyTorch uses: with others the last bits differ.
    """
    if device == "cuda":
        return f"cuda ({torch.cuda.get_device_name()})"
    if device == "cpu":
        return f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return f"{device} ({platform.machine()})"


def empty_cache(device: str) -> None:
    """Gives memory that the last trial held back to the device."""
    if device == "cuda":
        torch.cuda.empty_cache()
    elif device == "mps":
        torch.mps.empty_cache()
