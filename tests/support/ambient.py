"""Ambient state: what a user may have set for the whole process or thread, and what must change nothing of ours.

`install` wraps the package's entry points once. While a test has set an `Ambient`, every call from outside enters it
and every call back (a closure) leaves it. So tests make their tensors and check results as ever, and only the package
meets another default dtype, another default device, autocast, inference mode, deterministic algorithms, and another
number of threads.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import muonmesh.build
import muonmesh.checkpoint.save_load
import muonmesh.integrations.qk_clip
import muonmesh.numerics.newton_schulz
import muonmesh.optimizer
import muonmesh.tools.checkpoints.conversion
import muonmesh.tools.migration

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FUNCTIONS = {
    muonmesh.build: ("from_model", "split_params"),
    muonmesh.tools.checkpoints.conversion: ("convert",),
    muonmesh.checkpoint.save_load: ("load", "save"),
    muonmesh.numerics.newton_schulz: ("orthogonalize",),
}
METHODS = (
    "__init__",
    "__getstate__",
    "add_param_group",
    "clip_grad_norm_",
    "explain",
    "load_state_dict",
    "metrics",
    "state_dict",
    "step",
)


@dataclass
class _State:
    """What calls from outside meet, and whether one is running."""

    ambient: Ambient | None = None
    inside: bool = False


_state = _State()


@dataclass(frozen=True)
class Ambient:
    """What is set around a call."""

    dtype: torch.dtype = torch.float32
    device: str | None = None
    autocast: torch.dtype | None = None
    inference: bool = False
    deterministic: bool = False
    threads: int = 1

    @classmethod
    def drawn(cls, seed: object) -> Ambient:
        """Draw one; each part is as usual about half of the time."""
        random_numbers = random.Random(str(seed))

        def choose(usual: Any, *others: Any) -> Any:
            return random_numbers.choice(others) if random_numbers.random() < 0.5 else usual

        return cls(
            choose(*DTYPES),
            choose(None, "meta", "cpu"),
            choose(None, torch.bfloat16, torch.float16),
            choose(False, True),
            choose(False, True),
            choose(1, 2, 3),
        )


@contextmanager
def entered(ambient: Ambient) -> Iterator[None]:
    """Set it, and give back what was set before."""
    before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with ExitStack() as stack:
        torch.set_default_dtype(ambient.dtype)
        stack.callback(torch.set_default_dtype, before[0])
        torch.use_deterministic_algorithms(ambient.deterministic)
        stack.callback(torch.use_deterministic_algorithms, before[1])
        torch.set_num_threads(ambient.threads)
        stack.callback(torch.set_num_threads, before[2])
        if ambient.device is not None:
            stack.enter_context(torch.device(ambient.device))
        if ambient.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=ambient.autocast))
        if ambient.inference:
            stack.enter_context(torch.inference_mode())
        yield


@contextmanager
def around_entries(ambient: Ambient | None) -> Iterator[None]:
    """Meet every call of the package with this state."""
    before, _state.ambient = _state.ambient, ambient
    try:
        yield
    finally:
        _state.ambient = before


def _met(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _state.ambient is None or _state.inside:
            return function(*args, **kwargs)
        _state.inside = True
        try:
            with entered(_state.ambient):
                return function(*map(_back, args), **{key: _back(value) for key, value in kwargs.items()})
        finally:
            _state.inside = False

    # Warnings point past torch's calls, and so they do past this one.
    as_torch = {**globals(), "__name__": "torch"}
    return functools.wraps(function)(types.FunctionType(wrapper.__code__, as_torch, closure=wrapper.__closure__))


def _back(argument: Any) -> Any:
    """A function of the caller's sees the caller's state."""
    if not callable(argument) or isinstance(argument, (type, torch.nn.Module)) or hasattr(argument, "_current_device"):
        return argument

    @functools.wraps(argument)
    def called(*args: Any, **kwargs: Any) -> Any:
        with entered(Ambient()), torch.autocast("cpu", enabled=False), torch.inference_mode(False):
            return argument(*args, **kwargs)

    return called


def install() -> None:
    """Wrap the entry points; before any test imports them."""
    for module, names in FUNCTIONS.items():
        for name in names:
            setattr(module, name, _met(getattr(module, name)))
    for name in METHODS:
        setattr(muonmesh.optimizer.Muon, name, _met(getattr(muonmesh.optimizer.Muon, name)))
