"""A certificate: which Muon computes in which layout what it computes in one process. Writes docs/certificate.md.

    python -m benchmarks.studies.certificate --cache FOLDER --peer dion=PATH --json benchmarks/results/certificate.json
    python -m benchmarks.studies.certificate --projects muonmesh torch --kinds ddp fsdp2     # something quick
    python -m benchmarks.studies.certificate --page                                # the page of the recorded run

Each project's own package takes three steps in one process and in each layout, on 2 and on 4 gloo ranks of one thread,
with the same weights and the same gradients (certificate_cells.py). The whole weights after each step are compared
with those of the same project in one process. Packages that are in no environment of this checkout are installed into
the folder FOLDER, without their dependencies. torch.compile is off.

A difference is the Frobenius norm of the difference of one weight after the last step, divided by the norm of the last
step of that weight in one process; the largest of all weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.studies.certificate_cells import KINDS, MODELS, PROJECTS, Layout, ReplicasError, cell, layouts

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/results/certificate.json"
PAGE = ROOT / "docs/certificate.md"
ROUNDING = 1e-6
PATIENCE = 60.0  # seconds for a cell; a rank that waits for another one waits as long
ABSENT = re.compile("CUDA|ProcessGroupGloo::")  # gloo refuses shapes that NCCL takes
COLLECTIVE = re.compile(r"gloo|Connection (closed|reset)|closed by peer")


@dataclass(frozen=True)
class Environment:
    """Where a project runs.

    Attributes:
        python: The environment, in this checkout.
        requirements: What is installed into a folder of the cache, without dependencies.
        checkout: The name of a checkout (`--peer NAME=PATH`) that it needs.
        distributions: The packages whose versions are recorded.
    """

    python: str
    requirements: tuple[str, ...] = ()
    checkout: str = ""
    distributions: tuple[str, ...] = ()


HOSTS, MEGATRON = ".venv-hosts", ".venv-megatron"
MEGATRON_NEXT = ".venv-megatron-next"  # of Python 3.12
IN_MEGATRON = Environment(
    MEGATRON, ("absl-py==2.5.1",), checkout="emerging_optimizers", distributions=("megatron-core",)
)
IN_MEGATRON_NEXT = Environment(
    MEGATRON_NEXT,
    ("absl-py==2.5.1", "emerging-optimizers==0.3.0"),
    distributions=("megatron-core", "emerging-optimizers"),
)
IN_AXOLOTL = Environment(
    HOSTS,
    ("axolotl==0.21.0", "axolotl-contribs-mit==0.0.6", "addict==2.4.0"),
    distributions=("axolotl", "axolotl-contribs-mit"),
)
ENVIRONMENTS = {
    "muonmesh": Environment(".venv", distributions=("muonmesh",)),
    "muonmesh_deepspeed": Environment(".venv", distributions=("muonmesh", "deepspeed")),
    "muonmesh_megatron": Environment(MEGATRON, distributions=("muonmesh", "megatron-core")),
    "muonmesh_megatron_next": Environment(MEGATRON_NEXT, distributions=("muonmesh", "megatron-core")),
    "torch": Environment(".venv"),
    "deepspeed": Environment(".venv", distributions=("deepspeed",)),
    "megatron_blockwise": IN_MEGATRON,
    "megatron_duplicated": IN_MEGATRON,
    "megatron_next_blockwise": IN_MEGATRON_NEXT,
    "megatron_next_duplicated": IN_MEGATRON_NEXT,
    "dion": Environment(HOSTS, checkout="dion"),
    "torchtitan": Environment(HOSTS, distributions=("torchtitan",)),
    "veomni": Environment(
        HOSTS, ("veomni==0.1.12", "transformers==5.3.0", "tokenizers==0.22.2"), distributions=("veomni",)
    ),
    "axolotl": IN_AXOLOTL,
    "axolotl_8bit": IN_AXOLOTL,
    "heavyball": Environment(HOSTS, ("heavyball==3.2.1", "opt-einsum==3.4.0"), distributions=("heavyball",)),
    "dmuon": Environment(HOSTS, checkout="dmuon"),
    "muonium": Environment(HOSTS, distributions=("muonium",)),
    "keller_jordan": Environment(HOSTS, distributions=("muon-optimizer",)),
    "muon_fsdp2": Environment(HOSTS, ("muon-fsdp2==0.3.0",), distributions=("muon-fsdp2",)),
}


# ---------------------------------------------------------------- in a project's environment


def measured(name: str, kinds: Iterable[str]) -> dict[str, Any]:
    """Run the cells of one project in this interpreter."""
    import torch
    from tests.support.workers import Pool

    project = PROJECTS[name]
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    begin = time.monotonic()
    record: dict[str, Any] = {"title": project.title, "date": f"{date.today()}", "cells": {}}
    record["versions"] = {"torch": torch.__version__}
    for distribution in ENVIRONMENTS[name].distributions:
        record["versions"][distribution] = _version(distribution)
    try:
        importlib.import_module(project.package)
    except Exception as error:
        return record | {"absent": f"{type(error).__name__}: {error}".splitlines()[0]}
    multiprocessing.set_forkserver_preload(
        ["tests.support.workers", "benchmarks.studies.certificate_cells", project.package]
    )
    pools: dict[int, Pool] = {}
    references: dict[str, Any] = {}

    def run(layout: Layout, audited: bool = False) -> Any:
        pool = pools.setdefault(layout.ranks, Pool(layout.ranks))
        return outcome(pool, project.package, cell, name, layout, audited)

    try:
        for layout in sorted(
            layouts(kind for kind in kinds if kind in project.kinds), key=lambda one_layout: one_layout.ranks
        ):
            if layout.model not in references:
                references[layout.model] = run(layout.alone(project.alone))
            reference = references[layout.model]
            if isinstance(reference, dict):
                record["cells"][layout.name] = reference | {"in one process": True}
                continue
            result = run(layout)
            if isinstance(result, list):
                result = compared(result, reference)
                if result["word"] == "differs" and project.audits:
                    verdicts = run(layout, audited=True)
                    result |= {"audit": verdicts} if "word" not in verdicts else {}
            record["cells"][layout.name] = result
            print(f"{project.title}, {layout.name}: {text_of(result)}", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    return record | {"seconds": round(time.monotonic() - begin)}


def outcome(pool: Any, package: str, run: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 returns, or the word and message of the ranks' errors."""
    from tests.support.workers import RankFailure

    try:
        outcomes = pool.run_expecting_errors(run, *args, timeout=PATIENCE)
    except RankFailure as failure:
        return ended(str(failure))
    errors = [result for result in outcomes if result.error is not None]
    if not errors:
        return outcomes[0].value
    pool.close()  # after an error the ranks may be out of step
    first = next((result for result in errors if not COLLECTIVE.search(result.message)), errors[0])
    message = f"{first.error.__name__}: {first.message}".strip().splitlines()[0][:300]
    deliberate = len(errors) == len(outcomes) and all(raised_by(package, result.traceback) for result in errors)
    word = "replicas differ" if first.error is ReplicasError else "refuses" if deliberate else "fails"
    return {"word": "cannot run here" if ABSENT.search(message) else word, "message": message}


def raised_by(package: str, traceback: str) -> bool:
    """Whether the last line of a traceback is a `raise` or an `assert` of a package: a decision, not an accident."""
    last = traceback.rpartition('  File "')[2]
    path, _, rest = last.partition('"')
    code = rest.splitlines()[1].strip() if len(rest.splitlines()) > 1 else ""
    asserted = "\nAssertionError" in rest  # of an assertion of several lines, the traceback shows another one
    return f"/{package.replace('.', '/')}" in path and (code.startswith(("raise", "assert")) or asserted)


def ended(failure: str) -> dict[str, Any]:
    """What is said of ranks that died, or waited in vain."""
    raised = re.search(r"rank (\d) of \d raised.*?\n(\w[\w.]*(?:Error|Exception)[^\n]*)", failure, re.DOTALL)
    died = re.search(r"rank \d of \d died: [^\n]*", failure)
    if raised:
        return {"word": "fails", "message": f"rank {raised[1]}: {raised[2][:250]}; other ranks wait"}
    return {"word": "fails", "message": died[0] if died else f"no end after {PATIENCE:.0f} s"}


def compared(weights: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """How weights after each step differ from those of one process."""
    import torch

    assert all(tensors.keys() == others.keys() for tensors, others in zip(weights, reference, strict=True))
    assert all(torch.equal(weights[0][name], begun) for name, begun in reference[0].items()), "they begin elsewhere"
    if all(torch.equal(a[n], b[n]) for a, b in zip(weights, reference, strict=True) for n in b):
        return {"word": "bits", "relative": 0.0}
    last = {n: (reference[-1][n] - reference[-2][n]).double().norm() for n in reference[-1]}
    apart = {n: float((weights[-1][n].double() - reference[-1][n].double()).norm() / last[n]) for n in last}
    worst = max(apart, key=lambda n: apart[n])
    word = "rounding" if apart[worst] <= ROUNDING else "differs"
    return {
        "word": word,
        "relative": float(f"{apart[worst]:.3g}"),
        "worst": worst,
        "equal": sum(not x for x in apart.values()),
        "of": len(apart),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


# ---------------------------------------------------------------- all projects


def environment_of(name: str, cache: Path | None, peers: dict[str, Path]) -> tuple[str, dict[str, str]] | str:
    """The interpreter of a project and its environment, or why there is none."""
    needs = ENVIRONMENTS[name]
    python = ROOT / needs.python / "bin/python"
    if not python.exists():
        return f"no {needs.python} in this checkout: write make {needs.python}/.ready"
    paths = [str(ROOT)]
    if needs.checkout:
        if needs.checkout not in peers:
            return f"no checkout: write --peer {needs.checkout}=PATH"
        paths.insert(0, str(peers[needs.checkout]))
    if needs.requirements:
        if cache is None:
            return f"{' and '.join(needs.requirements)}: write --cache FOLDER to install it"
        target = cache / name
        if not (target / ".ready").exists():
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
            pip += ["--ignore-requires-python"]  # axolotl 0.21 asks for 3.12, and its optimizers run on 3.11
            installation = subprocess.run([*pip, *needs.requirements], capture_output=True, text=True, check=False)
            if installation.returncode:
                return f"pip cannot install it: {installation.stderr.strip().splitlines()[-1][:200]}"
            (target / ".ready").touch()
        paths.insert(0, str(target))
    return str(python), {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}


def all_projects(names: Iterable[str], kinds: list[str], cache: Path | None, peers: dict[str, Path]) -> dict[str, Any]:
    """Run each project in an interpreter of its own."""
    records = {}
    for name in names:
        interpreter = environment_of(name, cache, peers)
        if isinstance(interpreter, str):
            records[name] = {"title": PROJECTS[name].title, "cells": {}, "versions": {}, "absent": interpreter}
            continue
        python, environment = interpreter
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            run = [python, "-m", "benchmarks.studies.certificate", "--run", name, "--json", str(file)]
            run += ["--kinds", *kinds]
            process = subprocess.run(run, env=environment, cwd=ROOT, check=False)
            if process.returncode:
                records[name] = {"title": PROJECTS[name].title, "cells": {}, "versions": {}}
                records[name]["absent"] = f"the run ended with {process.returncode}"
                continue
            records[name] = json.loads(file.read_text())
        checkout = ENVIRONMENTS[name].checkout
        if checkout:
            records[name]["versions"][checkout] = _commit(peers[checkout])
    return records


def _commit(path: Path) -> str:
    commit_file = path / "COMMIT"
    if commit_file.exists():
        return commit_file.read_text().strip()
    process = subprocess.run(
        ["git", "-C", str(path), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return process.stdout.strip() or "unknown"


def text_of(result: dict[str, Any]) -> str:
    """A cell in words."""
    return f"differs by {result['relative']:.2g}" if result["word"] == "differs" else str(result["word"])


# ---------------------------------------------------------------- the page


def page(record: dict[str, Any]) -> str:
    """Return docs/certificate.md of a recorded run."""
    rows = record["tables"]
    titles = [title for title, _ in KINDS.values()]
    table = [f"| | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    table += [f"| {row['title']} | {' | '.join(_cell(row, kind) for kind in KINDS)} |" for row in rows.values()]
    ran = {name: row for name, row in rows.items() if row["cells"]}
    versions = ["| project | version | torch | date | seconds |", "|---|---|---|---|---|"]
    for row in ran.values():
        others = ", ".join(f"{key} {value}" for key, value in row["versions"].items() if key != "torch")
        versions.append(
            f"| {row['title']} | {others} | {row['versions']['torch']} | {row['date']} | {row['seconds']} |"
        )
    notes = [f"- **{PROJECTS[name].title}.** {note}" for name in rows if (note := _note(name))]
    messages = [line for row in ran.values() for line in _messages(row)]
    absent = [f"- **{row['title']}**: {row['absent']}" for row in rows.values() if row.get("absent")]
    absent += [f"- **{title}**: {why}" for title, why in NOT_RUN.items()]
    text = TEMPLATE.format(
        table="\n".join(table),
        versions="\n".join(versions),
        notes="\n".join(notes),
        messages="\n".join(messages),
        absent="\n".join(absent),
        differences=_differences(ran),
        cpu=record["cpu"],
        python=record["python"],
        minutes=f"{sum(row['seconds'] for row in ran.values()) / 60:.0f}",
        words="\n".join(f"| {word} | {meaning} |" for word, meaning in WORDS.items()),
        peers="".join(f" \\\n    --peer {environment.checkout}=PATH" for environment in _checkouts()),
    )
    return text


def _checkouts() -> list[Environment]:
    return list(
        {environment.checkout: environment for environment in ENVIRONMENTS.values() if environment.checkout}.values()
    )


def _cell(row: dict[str, Any], kind: str) -> str:
    """2 ranks and 4 ranks, as one where they say the same."""
    cells = [row["cells"][layout.name] for layout in layouts([kind]) if layout.name in row["cells"]]
    if not cells:
        return "–"
    words = [f"{result['relative']:.2g}" if result["word"] == "differs" else result["word"] for result in cells]
    words = ["**bits**" if word == "bits" else word for word in words]
    return words[0] if len({*words}) == 1 else " / ".join(words)


def _note(name: str) -> str:
    project = PROJECTS[name]
    titles = " and ".join(KINDS[kind][0] for kind in project.unpromised)
    return f"{project.note}{f' We tried {titles} all the same.' if titles else ''}"


def _messages(row: dict[str, Any]) -> list[str]:
    """What refusals and failures said, each message once."""
    by: dict[tuple[str, str], list[str]] = {}
    for name, result in row["cells"].items():
        if "message" in result:
            heading = f"{result['word']}{', in one process too' if result.get('in one process') else ''}"
            kind, _, ranks = name.rpartition("-")
            by.setdefault((heading, result["message"]), []).append(f"{KINDS[kind][0]} on {ranks}")
    return [f"| {row['title']} | {', '.join(names)} | {word} | `{message}` |" for (word, message), names in by.items()]


def _differences(ran: dict[str, Any]) -> str:
    """A row for each difference: its size, and the verdict of an audit."""
    lines = ["| project | layout | difference | weights that are equal | an audit says |", "|---|---|---|---|---|"]
    for row in ran.values():
        for name, result in row["cells"].items():
            if result["word"] in ("differs", "rounding"):
                kind, _, ranks = name.rpartition("-")
                verdicts = ", ".join(f"{word} ({count})" for word, count in result.get("audit", {}).items())
                figures = f"{result['relative']:.2g} | {result['equal']} of {result['of']} | {verdicts or '–'}"
                lines.append(f"| {row['title']} | {KINDS[kind][0]}, {ranks} ranks | {figures} |")
    return "\n".join(lines)


NOT_RUN = {
    "Emerging-Optimizers": "it has no layouts of its own. Megatron-Core 0.16.1 calls its version 0.1.0, and 0.19.2 the "
    "0.3.0 of PyPI.",
}

WORDS = {
    "**bits**": "After each of three steps, every weight has the same bits as in one process.",
    "rounding": f"The weights differ by at most {ROUNDING:.0e} of one update.",
    "a number": "The weights differ by this much, in units of one update. Rounding in bf16 gives about 0.05; "
    "another matrix gives 0.5 and more. The [differences](#differences) say which.",
    "replicas differ": "Two ranks hold different values of the same weight.",
    "refuses": "On every rank, the package raises an error of its own.",
    "fails": "Another error is raised, or some ranks raise none, or the step does not end.",
    "cannot run here": "The package needs a GPU, or a collective that gloo does not have and NCCL has.",
    "–": "We know no documented way to use the package in this layout.",
}

TEMPLATE = """\
# Certificate: the same update as one process

This page shows which Muon optimizers compute the same update in a distributed run as in one process. One command writes
the page, and you can [run it yourself](#run-it-yourself).

{table}

If a cell has two entries, the first is for 2 ranks and the second for 4.

| entry | meaning |
|---|---|
{words}

## What is compared

Each project takes three steps, in one process and in each layout, with the same weights and the same gradients. The
gradients are small integers times a power of two. The ranks contribute different gradients, and their average is exact
in any order of addition. So a difference comes from the optimizer, not from the reduction.

- A project is compared with itself: the same package with the same settings in one process. The table does not say
  which update is better.
- Each project runs with its default settings, a learning rate of 0.02, and fp32 weights.
- In data-parallel layouts, the framework averages the gradients. Under TP and EP, every rank gets its shard of the
  whole gradient.
- Most matrices have 384 × 256, 256 × 384 or 256 × 256 elements. "FSDP2, uneven" has sizes that the ranks do not divide,
  and a matrix with fewer rows than ranks. EP shards a stack of four experts.
- In Megatron-Core, the model is a GPTModel with two layers and a hidden size of 32.
- A difference is the Frobenius norm of the difference of a weight after three steps, divided by the norm of its third
  update. The table shows the largest of all weights.
- `torch.compile` is off, and every rank has one thread. We ran nothing of this on GPUs, where kernels may depend on
  shapes in other ways.

## Differences

The last column is what [`muonmesh.audit`](audit.md) says about the optimizer in that layout. "Orthogonalized" means
that each whole matrix is orthogonalized, so only rounding differs. Audit cannot step frameworks that take gradients
during the backward pass.

{differences}

## Refusals and failures

| project | where | entry | message |
|---|---|---|---|
{messages}

## Notes

{notes}

## What was not run

{absent}

## Run it yourself

```
make setup .venv-hosts/.ready .venv-megatron/.ready
make .venv-megatron-next/.ready PYTHON312=python3.12     # for the rows of Megatron-Core 0.19
.venv/bin/python -m benchmarks.studies.certificate --cache /tmp/certificate --json certificate.json{peers}
```

A `--peer` is a checkout of a project that is on no package index. Without the option, the command leaves the project
out. `--projects muonmesh torch --kinds ddp fsdp2` runs a part of the table. The recorded run took {minutes} minutes, on
2 cores that other programs used at the same time.

Recorded on {cpu}, with Python {python}, over gloo.

{versions}
"""


def main() -> None:
    """Run what was asked for."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--projects", nargs="+", choices=list(PROJECTS), default=list(PROJECTS), metavar="PROJECT")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--cache", type=Path, help="a folder for packages that are in no environment of this checkout")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="a checkout")
    parser.add_argument("--json", metavar="FILE", help="write the cells there; those of other projects stay")
    parser.add_argument("--page", action="store_true", help="write docs/certificate.md from the recorded run")
    parser.add_argument("--run", choices=list(PROJECTS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        Path(chosen.json).write_text(json.dumps(measured(chosen.run, chosen.kinds)))
        return
    peers = {name: Path(path).resolve() for name, _, path in (entry.partition("=") for entry in chosen.peer)}
    if chosen.page:
        PAGE.write_text(page(json.loads(RECORDED.read_text())))
        return
    records = all_projects(chosen.projects, chosen.kinds, chosen.cache and chosen.cache.resolve(), peers)
    for name, row in records.items():
        print(name, row.get("absent", ""), {key: text_of(entry) for key, entry in row["cells"].items()})
    if chosen.json:
        from benchmarks.contenders import Entries
        from benchmarks.report import write_json

        if Path(chosen.json).exists():
            rows = json.loads(Path(chosen.json).read_text())["tables"] | records
            records = {name: rows[name] for name in PROJECTS if name in rows}
        facts = {"models": MODELS}
        write_json(chosen.json, "-m benchmarks.studies.certificate", Entries((), (), {}), records, facts)


if __name__ == "__main__":
    main()
