"""`muonmesh train`: where text comes from, and how runs begin and go on."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import muonmesh as mm
from muonmesh.tools.cli import training
from muonmesh.tools.cli.checkpoints import checkpoints_of
from muonmesh.tools.cli.corpus import Windows, load_corpus_of, prepare_corpus, save_corpus_of
from muonmesh.tools.cli.model import build_model, model_config
from muonmesh.tools.cli.report import read_metrics
from muonmesh.tools.cli.run_settings import Settings, load_settings
from muonmesh.tools.cli.training import StopRequest
from tests.support.workers import Pool

COVERS = ("tools.cli.run.train_run",)

COMMAND = (sys.executable, "-c", "from muonmesh.tools.cli import main; main()", "train")
STEPS = 3
TINY = ("--steps", STEPS, "--batch", 4, "--seq", 32, "--eval-every", 10, "--eval-sequences", 4, "--device", "cpu")
TINY += ("--ranks", 1, "--parallel", "ddp", "--dtype", "fp32", "--optimizer", "muon")


def train(*options: object) -> str:
    result = subprocess.run([*COMMAND, *map(str, options)], capture_output=True, text=True, check=False, timeout=1500)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def sentences(count: int) -> list[str]:
    return [
        f"Sentence {number} tells that {number} times {number} is {number * number}. " * 6 for number in range(count)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred files, and an empty one."""
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate([*sentences(200), " "]):
        (folder / f"{number}.txt").write_text(text)
    return folder


# --- text -------------------------------------------------------------------------------------------------------------


def test_each_file_is_a_document_of_its_own(texts: Path, tmp_path: Path) -> None:
    corpus = prepare_corpus([str(texts)], vocab=300, cache=tmp_path / "cache")
    assert corpus.files == 201
    tokenizer = Tokenizer.from_file(str(Path(corpus.directory) / "tokenizer.json"))
    train, held_out = (
        {tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1)} - {""}
        for tokens in (corpus.train(), corpus.validation())
    )
    assert len(train) + len(held_out) == 200
    assert 2 <= len(held_out) <= 30, "about one file in twenty"
    assert {text.removesuffix("<|endoftext|>") for text in train | held_out} == set(sentences(200))


def test_a_text_that_is_tokenised_in_many_parts_gives_the_same_tokens(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_corpus([str(texts)], vocab=300, cache=tmp_path / "whole")
    monkeypatch.setattr("muonmesh.tools.cli.corpus.CHARACTERS_AT_ONCE", 1000)
    parts = prepare_corpus([str(texts)], vocab=300, cache=tmp_path / "parts")
    assert parts.digest == whole.digest


# --- runs of one rank ------------------------------------------------------------------------------------------------


def learn(run: Path) -> None:
    """What a rank of the command does, in a rank of the tests."""
    settings = load_settings(run)
    for name in settings.optimizers:
        training.train(name, settings, load_corpus_of(run), torch.device("cpu"), StopRequest())


@pytest.fixture(scope="module")
def ran(
    workers: Callable[[int], Pool], texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Settings], Path]:
    """`ran(settings)` is the directory of a finished run of one rank."""
    folder = tmp_path_factory.mktemp("ran")

    def train(settings: Settings) -> Path:
        corpus = prepare_corpus([str(texts)], vocab=300, cache=folder / "cache")
        settings.directory.mkdir(parents=True)
        settings.save({})
        save_corpus_of(settings.directory, corpus)
        workers(1).run(learn, settings.directory, timeout=120)
        return settings.directory

    return train


@pytest.fixture(scope="module")
def settings_of(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Settings]:
    """`settings_of(name, optimizer=..., ...)` are the settings of a run of one rank over the texts."""
    folder = tmp_path_factory.mktemp("asked")

    def settings(name: str, **changes: Any) -> Settings:
        values: dict[str, Any] = {"model": "nano", "vocab": 300, "optimizer": "muon"}
        values |= {"ranks": 1, "parallel": "ddp", "dtype": "fp32", "steps": STEPS, "warmup": 0, "batch": 4, "seq": 32}
        values |= {"eval_every": 10, "eval_sequences": 4, "data": (str(texts),)}
        return Settings(out=str(folder / name), **{**values, **changes})

    return settings


@pytest.fixture(scope="module")
def trained(ran: Callable[[Settings], Path], settings_of: Callable[..., Settings]) -> Path:
    return ran(settings_of("trained"))


def validated(run: Path) -> list[float]:
    return [record["validation_loss"] for record in read_metrics(run) if "validation_loss" in record]


def predicted(run: Path) -> float:
    """Read the weights of a run into a model of transformers, and return its loss on the held-out text."""
    settings = load_settings(run)
    model = build_model(model_config(settings.model, vocab=settings.vocab, seq=settings.seq))
    optimizer = mm.from_model(model, lr=1.0, process_group="local")
    mm.checkpoint.load(checkpoints_of(run, "muon") / f"step-{STEPS:08d}", model, optimizer)
    tokens = torch.from_numpy(Windows(load_corpus_of(run).validation(), length=32, seed=0).spread(4))
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.slow
def test_the_weights_of_a_run_load_into_a_model_that_predicts_what_was_trained(
    trained: Path, workers: Callable[[int], Pool]
) -> None:
    loss = workers(1).run(predicted, trained)[0]
    assert loss == pytest.approx(validated(trained)[-1], abs=1e-5)
    assert loss < math.log(300) - 0.1


@pytest.mark.slow
@pytest.mark.soak
def test_resume_auto_begins_a_run_or_goes_on_with_it(trained: Path, texts: Path, tmp_path: Path) -> None:
    options = (*TINY, "--model", "nano", "--vocab", 300, "--data", texts, "--warmup", 0)
    run = tmp_path / "run"
    train(*options, "--out", run, "--resume", "auto")
    assert losses(run) == losses(trained), "it began like any other"
    before = (run / "metrics.jsonl").read_text()
    train(*options, "--out", run, "--resume", "auto")
    assert (run / "metrics.jsonl").read_text() == before, "a finished run is left as it is"


def test_resume_insists_on_the_same_settings(tmp_path: Path) -> None:
    from muonmesh.tools.cli.run import _resumed

    Settings(out=str(tmp_path), lr=0.003).save({})
    options = {"ranks": 4, "lr": 0.003, "out": tmp_path, "device": "auto"}
    assert _resumed(tmp_path, options, set(options)) == Settings(out=str(tmp_path), ranks=4, lr=0.003)
    with pytest.raises(ValueError, match=r"--resume .*: found --steps 7, and 600 in that run; needed the same"):
        _resumed(tmp_path, {"steps": 7}, {"steps"})
    with pytest.raises(ValueError, match=r"--resume .*: found --out other; needed the directory of that run"):
        _resumed(tmp_path, {"out": Path("other")}, {"out"})
