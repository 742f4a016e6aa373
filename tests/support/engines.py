"""Engines of frameworks on two gloo ranks: what these import, and four steps that are resumed and compared.

The tests that use it run with --noconftest, in the environments of their frameworks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import muonmesh as mm
from tests.hosts.replay import Given, different, replayed, weights
from tests.support import workers

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SAME: dict[str, Any] = {"muon": True, "matrices": 14, "plain loop": [], "resumed": []}
"""What `train_and_resume` returns beside the rates, for the models of two layers."""


def prepare_ranks(*modules: str, folders: Sequence[str] = (), **environment: str) -> None:
    """Have this process and its ranks find the examples and ``folders``; import modules once for all ranks."""
    paths = [EXAMPLES, *folders]
    sys.path += paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *paths)))
    os.environ |= {"HF_HUB_OFFLINE": "1", **environment}
    multiprocessing.set_forkserver_preload([workers.__name__, "muonmesh.build", *workers.MODELS, *modules])


@pytest.fixture(scope="module")
def pair() -> Iterator[workers.Pool]:
    """Two ranks for a file: frameworks keep groups for the life of a process."""
    pool = workers.Pool(2)
    yield pool
    pool.close()


def train_and_resume(
    engine: Any,
    step: Callable[[Any, range], None],
    save: Callable[[Any], None],
    resume: Callable[[], Any],
    model_of: Callable[[Any], nn.Module],
    alone: nn.Module,
    **settings: Any,
) -> dict[str, Any]:
    """Train an engine for four steps, resume from a checkpoint after the second, and replay all in one process.

    Args:
        engine: Has an ``optimizer``.
        step: Takes these steps with the engine's own methods.
        save: Writes the checkpoint.
        resume: Returns another engine that has read it.
        model_of: Returns an engine's model.
        alone: The model as it was at first.
        **settings: Of the optimizer in the plain loop.
    """
    optimizer, inputs = engine.optimizer, list[Given]()
    optimizer.register_step_pre_hook(lambda *_: inputs.append(Given.to(optimizer)))
    step(engine, range(2))
    save(engine)
    step(engine, range(2, 4))
    after = weights(model_of(engine))
    second = resume()
    step(second, range(2, 4))
    return {
        "muon": type(optimizer) is mm.Muon,
        "matrices": len(optimizer.param_groups[0]["params"]),
        "plain loop": different(after, replayed(alone, inputs, **settings)),
        "resumed": different(after, weights(model_of(second))),
        "rates": [set(given.rates.values()) for given in inputs],
    }
