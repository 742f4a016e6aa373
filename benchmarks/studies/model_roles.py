"""What `split_params(model, example=...)` makes of all models of transformers, and of other libraries' models.

    python -m benchmarks.studies.model_roles --json benchmarks/results/model_roles.json
    python -m benchmarks.studies.model_roles --only GPT2LMHeadModel --only timm/vit

Each class of transformers is built small (two layers, widths divided, see `tests/support/zoo.py`) and run on generated
inputs. The oracle (`tests/support/influence.py`) shares nothing with the reader of graphs: it watches operations for
which weights take part in what a product reads, and it changes single rows of weights and looks which operands of later
products move.

A difference is silent if `split_params` did not warn of this weight. `EXPLAINED` has those that are no errors, and why.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.studies.model_table import MODELS
from tests.support import zoo
from tests.support.influence import Influence, differences
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode
from torch.utils._pytree import tree_leaves

from muonmesh import split_params
from muonmesh.groups import example as examples

ROOT = Path(__file__).resolve().parents[2]

FACTORS = (16, 8, 4, 2, 1)
"""Widths are divided by the first of these with which a class can be built and run."""
LARGEST = 60_000_000
"""Of more parameters, no class is built."""
ROWS = 5_000_000
"""Of more parameters, a model's single rows are not changed: only its ends are compared."""

EXPLAINED = [
    ("not last", r"pooler|summary", "nothing reads what this pooler makes"),
    ("not last", r"projection|projector", "nothing reads what this projection makes"),
    (
        "not last",
        r"(enc|pre)_(bbox|score)_head|bbox_embed|prob_out|feat_out",
        "also an output, by which anchors are chosen",
    ),
    ("joined", r"gates", "both gates make one operand of a product"),
    ("cut", r"shortcut", "units of a later ReLU are dead for some rows"),
    ("cut", r"mamba\.in_proj", "decays of some heads are rounded off for some rows (Falcon-H1)"),
    ("last", r"splinter_qass", "logits are products of what two layers make"),
    ("not last", r"start_logits", "also an output, by which states are chosen"),
    ("joined|cut", r"lstm|gru|rnn", "gates of one kernel of torch"),
    ("first|not first", r"query_pos_head", "reads coordinates that are detached"),
    ("cut", r"v_proj", "two halves of the value heads, which one query reads side by side (DiffLlama)"),
    ("last", r"down_proj", "its logits are made by a table of weights that is indexed first (CSM)"),
    ("last", r"predictions\.transform", "its logits are made by two tables that are joined first (MobileBERT)"),
    ("last", r"entity_linker", "logits are products of what two layers make"),
    ("not first", r"gate_bias", "biases of heads, by their name"),
    ("not last", r"auxiliary_head", "a guess, and said to be one: the example's forward does not show it"),
    ("cut", r"relative_pos_embeddings", "a guess, and said to be one: indices pick what it makes (ProphetNet)"),
]


class _TooLongError(BaseException):
    """A model took longer than its share; no `except Exception` in a model catches it."""


def _stop(*_: Any) -> None:
    raise _TooLongError


def small(name: str) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Yield ways to build and run a class of transformers."""
    errors: list[Exception] = []
    for factor in FACTORS:
        config, kind = zoo.small_config(name, factor), getattr(transformers, name)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
        except Exception as error:  # widths that its heads or groups do not divide
            errors.append(error)
            continue
        if size > LARGEST:
            errors.append(RuntimeError("too large"))
            break
        model = zoo.ready(kind(config))
        for example in zoo.drawn(model):
            yield model, example
    if errors:
        raise errors[0]


def results_of(outputs: Any) -> list[Tensor]:
    """The outputs that are results, and no states."""
    named = dict(outputs.items()) if hasattr(outputs, "items") else {"output": outputs}
    results = {key: value for key, value in named.items() if not zoo.INTERNAL.search(key)}
    return [leaf for leaf in tree_leaves(results or named) if isinstance(leaf, Tensor)]


def first_that_runs(makers: Iterable[tuple[nn.Module, Any]]) -> tuple[nn.Module, Any, Influence, Any]:
    """The first model that runs, its inputs, what influences what in it, and its outputs."""
    errors = []
    for model, example in makers:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # as drawn, many are zero, or too small to be seen behind others
                    parameter.normal_(0, 0.3 / max(1, parameter[0].numel()) ** 0.5)
                elif 0 < parameter.abs().max() < 1e-2:  # the scale of a layer, behind which changes are rounded off
                    parameter.fill_(0.5)
        influence = Influence(model, tree_leaves(example))
        try:
            with influence:
                outputs = call(model, example)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])
            continue
        return model, example, influence, outputs
    raise RuntimeError(errors[0] if errors else "nothing to run it with")


def call(model: nn.Module, example: Any) -> Any:
    """Run a forward."""
    return model(**example) if isinstance(example, dict) else model(*example)


def judged(makers: Iterable[tuple[nn.Module, Any]], expected: set[Any] | None, heads: bool = True) -> dict[str, Any]:
    """What differs for one model, with an example and without: silent, told by a warning, or explained."""
    model, arguments_of_model, influence, outputs = first_that_runs(makers)
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for key, example in (("with", arguments_of_model), ("without", None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            groups = split_params(model, example=example)
        warned = {name for w in caught for name in re.findall(r"[\w.*]+", str(w.message).partition(". Write")[0])}
        rows = (lambda: call(model, arguments_of_model)) if record["parameters"] < ROWS else None
        faults = {
            (kind, starred(name))
            for kind, name in differences(model, groups, influence, results_of(outputs), rows, expected)
        }
        faults = {(kind, name) for kind, name in faults if heads or kind not in ("last", "not last")}
        record[key] = sorted(f"{kind}: {name}{' (warns)' if name in warned else ''}" for kind, name in faults)
        if key == "with":
            matrices = [m for group in groups for m in group.get("matrices", ())]
            record["inputs"] = sum(len(g["params"]) for g in groups if g["name"].startswith("adamw.embeddings"))
            record["heads"] = sum(len(g["params"]) for g in groups if g["name"].startswith("adamw.head"))
            record["cut"] = sum("rows" in str(m) or "interleaved" in str(m) for m in matrices)
        elif expected is not None:
            break
    return record


def halves_and_cuts(groups: Any) -> dict[str, Any]:
    """The half of each weight, and how Muon's are cut."""
    return {
        name: group["matrices"][i] if "matrices" in group else "adamw"
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


def first_forward(makers: Iterable[tuple[nn.Module, Any]]) -> dict[str, Any]:
    """What the first training forward says of the guesses of one model, and what differs when its lines are written.

    "halves" and "cuts" count the weights whose guess differs from what an example shows, and "left" names those that
    still differ in the end; input layers do not show in a training forward.
    """
    model, example, *_ = first_that_runs(makers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_example = split_params(model, example=example)
    shown = halves_and_cuts(by_example)
    record: dict[str, Any] = {"errors": 0, "warnings": 0}
    overrides: dict[str, Any] = {}
    model.train()
    for attempt in range(6):
        groups = split_params(model, overrides=overrides)
        differing = {name: value for name, value in halves_and_cuts(groups).items() if value != shown[name]}
        if attempt == 0:
            record["halves"] = sum("adamw" in (value, shown[name]) for name, value in differing.items())
            record["cuts"] = len(differing) - record["halves"]
        if groups.watch is None:
            break
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(model, example)
            error = groups.watch.compare(groups, (), entire=True)
        texts = [str(error)] if error else [str(w.message) for w in caught if "overrides=" in str(w.message)]
        if not texts:
            break
        record["errors" if error else "warnings"] += 1
        lines = re.search(r"Write overrides=(\{.*?\}), or overrides=", texts[0])
        assert lines is not None
        overrides |= eval(lines[1], {})
    inputs = {n for group in by_example if group["name"].startswith("adamw.embeddings") for n in group["param_names"]}
    record["left"] = sorted(set(differing) - inputs)
    return record


def starred(name: str) -> str:
    """A name with stars for numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def explained(difference: str) -> str | None:
    """Why a difference is no error."""
    kind, _, name = difference.partition(": ")
    return next(
        (why for kinds, pattern, why in EXPLAINED if re.fullmatch(kinds, kind) and re.search(pattern, name)), None
    )


def walks() -> dict[str, float]:
    """Milliseconds of processor time that reading the graph takes, the least of seven."""
    facts = {
        "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)),
        "Llama 8B": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, use_cache=False
            )
        ),
    }
    seconds, read = {}, examples.facts_of_graph

    def timed(*args: Any) -> Any:
        start = time.process_time()
        facts = read(*args)
        times.append(1e3 * (time.process_time() - start))
        return facts

    examples.facts_of_graph = timed
    for name, make in facts.items():
        with torch.device("meta"):
            model = make()
        times: list[float] = []
        for _ in range(7):
            examples.facts_of_example(model, {"input_ids": torch.ones(2, 8, dtype=torch.long)})
        seconds[name] = round(min(times), 1)
    examples.facts_of_graph = read
    return seconds


def main() -> None:
    """Judge all models and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", help="names of classes, or LIBRARY/NAME of others")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each model")
    parser.add_argument(
        "--first-forwards",
        type=Path,
        help="classes that agree are read from this file, of which 200 run a first forward",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _stop)
    if arguments.first_forwards:
        print(json.dumps(first_forwards(arguments.first_forwards, arguments.seconds)))
        return
    makers: dict[str, tuple[Callable[[], Any], bool]] = {name: (make, True) for name, make in MODELS.items()}
    names = [name for name in zoo.names() if zoo.is_model(name)]
    random.Random(0).shuffle(names)  # so that a part of them is a sample
    makers |= {name: (lambda name=name: small(name), False) for name in names}
    chosen = {
        name: maker for name, maker in makers.items() if not arguments.only or any(o in name for o in arguments.only)
    }
    walk_ms = walks()
    print(json.dumps(walk_ms))
    records: dict[str, Any] = {}
    kinds: set[Any] = set()
    for name, (make, with_heads) in chosen.items():
        start = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, arguments.seconds * (8 if with_heads else 1))
        try:
            heads = not name.endswith(("Model", "Backbone", "Encoder", "Decoder"))
            records[name] = judged(make(), None if with_heads else kinds, heads)
        except (Exception, _TooLongError) as error:
            records[name] = {"left out": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            while _len_torch_dispatch_stack():  # a model that was stopped inside one
                _pop_mode()
        records[name]["seconds"] = round(time.perf_counter() - start, 1)
        if arguments.json:
            write(arguments.json, records, walk_ms)
        if arguments.only or records[name].get("with"):
            print(name, json.dumps(records[name]), flush=True)
    print(json.dumps(counts(records)))


def first_forwards(path: Path, seconds: float) -> dict[str, Any]:
    """Counts of what the first training forward says of 200 classes without an example."""
    names = sorted(json.loads(path.read_text())["second run"]["agree"])
    random.Random(5).shuffle(names)
    totals: Counter[str] = Counter()
    for name in names[:200]:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            record = first_forward(small(name))
        except (Exception, _TooLongError):
            totals["left out"] += 1
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        totals["classes"] += 1
        totals["classes that differ"] += bool(record["halves"] or record["cuts"])
        totals["weights in the other half"] += record["halves"]
        totals["weights cut otherwise"] += record["cuts"]
        totals["errors"] += bool(record["errors"])
        totals["warnings"] += bool(record["warnings"])
        totals["classes with other differences in the end"] += bool(record["left"])
    return dict(totals)


def counts(records: dict[str, Any]) -> dict[str, Any]:
    """How many ran, agreed and differed."""
    ran = {name: record for name, record in records.items() if "left out" not in record}
    silent = {name: [d for d in r["with"] if "(warns)" not in d and not explained(d)] for name, r in ran.items()}
    return {
        "classes": len(records),
        "ran": len(ran),
        "agree": sum(not record["with"] for record in ran.values()),
        "silent": {name: models for name, models in silent.items() if models},
        "left out": Counter(r["left out"].partition(":")[0] for r in records.values() if "left out" in r),
    }


def write(path: Path, records: dict[str, Any], walk_ms: dict[str, float]) -> None:
    """Write what there is after each model, so that nothing is lost if one ends the process."""
    path.write_text(json.dumps({"counts": counts(records), "walk_ms": walk_ms, "models": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
