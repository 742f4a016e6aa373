"""What the tests of `muonmesh train` share: runs that are ready for their ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muonmesh.tools.cli.corpus import prepare_corpus
from tests.support.runs import copy_texts, prepare_run
from tests.support.workers import Pool

SMALL: dict[str, Any] = {"model": "nano", "seq": 32, "dtype": "fp32", "batch": 4, "eval_sequences": 4, "warmup": 0}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what a module runs, with ``text``: a dozen files of the standard library, or ``TEXTS``."""
    folder = tmp_path_factory.mktemp("train")
    copy_texts(folder / "text", getattr(request.module, "TEXTS", 12))
    return folder


@pytest.fixture(scope="module")
def prepare(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Path]:
    """`prepare(name, parallel=..., ...)` is the directory of a run that is ready for its ranks.

    Its settings are `SMALL`, the module's ``SETTINGS`` and those that are given. A model may be a configuration.
    """
    settings = {**SMALL, "data": (str(folder / "text"),), **request.module.SETTINGS}
    corpus = prepare_corpus([str(folder / "text")], vocab=settings["vocab"], cache=folder / "cache")

    def run(name: str, **changes: Any) -> Path:
        values = {**settings, **changes}
        if isinstance(values["model"], dict):
            (folder / f"{name}.json").write_text(json.dumps(values["model"]))
            values["model"] = str(folder / f"{name}.json")
        return prepare_run(folder / name, corpus, **values)

    return run


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, workers: Callable[[int], Pool]) -> Pool:
    """As many ranks as the module's ``SETTINGS`` say."""
    return workers(request.module.SETTINGS["ranks"])
