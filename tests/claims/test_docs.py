"""What the documents name exists, what they say to write runs, and their pictures are small."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import typer
from matplotlib.image import imread
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from muonmesh.groups import unregister
from muonmesh.layout import Interval, MeshLayout
from muonmesh.numerics.kernels.threads import WAITING
from muonmesh.step.connection import placed_members
from muonmesh.step.muon_step import NAMES
from muonmesh.tools.cli.app import app
from tests.support.pages import run, scripts
from tests.support.programs import run_script
from tests.support.samples import one_in
from tests.support.workers import Pool

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
ONE_PROCESS = (
    "README.md",
    "docs/algorithm.md",
    "docs/optimizer.md",
    "docs/learning-rates.md",
    "docs/checkpoints.md",
    "docs/memory.md",
    "docs/clipping.md",
    "docs/groups.md",
    "docs/rules.md",
    "docs/variants.md",
    "docs/qk-clip.md",
    "docs/performance.md",
    "docs/migrating.md",
    "docs/internals/simulated.md",
)
SCRIPTS = ("docs/get-started.md",)  # whole scripts, each of which names its file in its first line
RANKS = (
    "docs/layouts.md",
    "docs/to-owners.md",
    "docs/deepspeed.md",
    "docs/new-framework.md",
)
HOSTS = ("docs/hosts.md",)  # by tests/hosts/test_page.py, where the hosts are installed
A_RUN = ("docs/training.md",)  # by tests/train/test_train.py, which has a run
WAYS = ("docs/thirty-ways.md",)  # by benchmarks/studies/ways.py, which runs them where their packages are
MEGATRON = ("docs/megatron.md",)  # by tests/megatron/test_page.py, where Megatron-Core is installed


def test_every_test_that_the_documents_name_exists() -> None:
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", written)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for path in DOCUMENTS for name in re.findall(r"`(?:[\w/]*/)?(test_\w+)", path.read_text())}
    assert len(named) > 20
    assert sorted(named - defined) == []


def test_the_page_about_gpu_results_names_what_runs() -> None:
    page = (ROOT / "docs" / "gpu-results.md").read_text()
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu-result.md").read_text()
    for text in (page, template):
        assert "make test-gpu" in text
        assert "modelled-and-measured.md" in text


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if not target.startswith("http") and not (path.parent / target).exists()
    ]
    assert broken == []


# ------------------------------------------------------------------ the site, which `make docs` builds


def test_every_page_has_a_place_in_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/")} - listed == set()  # its hook adds decisions


def test_no_page_is_in_the_navigation_twice() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(set(listed))


def test_every_public_name_has_a_place_in_the_reference() -> None:
    written = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert set(mm.__all__) - set(re.findall(r"^::: muonmesh\.(\w+)$", written, re.MULTILINE)) == set()


def test_every_argument_has_a_subject() -> None:
    page = (ROOT / "docs/reference/muon.md").read_text().partition("| set first |")[2]
    first, _, others = page.partition("| subject |")
    by_subject = [cell for row in others.splitlines() if row.startswith("| ") for cell in [row.split("|")[2]]]
    names = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in first.splitlines() if row.startswith("| ")))
    assert len(names) == 10
    names += re.findall(r"`(\w+)`", "".join(cell.replace("(`from_model`)", "") for cell in by_subject))
    arguments = {*inspect.signature(mm.Muon).parameters, *inspect.signature(mm.from_model).parameters}
    assert sorted(names) == sorted(arguments - {"params", "model"})


def test_what_a_page_loads_and_where_it_links_is_checked(tmp_path: Path) -> None:
    fine = '<link rel="stylesheet" href="a.css"><a href="#here" id="here"></a><a href="https://x.org">x</a>'
    (tmp_path / "a.css").write_text("p { background: url(b.png) }")
    page = tmp_path / "index.html"

    def faults() -> list[str]:
        script = ROOT / "docs" / "site" / "check.py"
        process = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
        assert process.returncode == (0 if "nothing is loaded" in process.stdout else 1)
        return [] if process.returncode == 0 else process.stdout.splitlines()

    page.write_text(fine)
    assert faults() == []
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/f.css';")
    wrong = '<script src="//cdn.example/x.js"></script><img src="gone.png"><a href="no.html"></a><a href="#no"></a>'
    page.write_text(fine + wrong)
    assert [line.split(": ")[1].split(",")[0] for line in faults()] == [
        "loads //cdn.example/x.js from elsewhere",
        "loads gone.png",
        "links to no.html",
        "links to #no",
        "loads https://fonts.example/f.css",
    ]


# ------------------------------------------------------------------ snippets


def test_every_page_with_snippets_is_run() -> None:
    pages = {str(path.relative_to(ROOT)) for path in DOCUMENTS if "```python" in path.read_text()}
    assert pages == {*ONE_PROCESS, *SCRIPTS, *RANKS, *HOSTS, *MEGATRON, *WAYS, *A_RUN}


class Net(nn.Module):
    """A model of matrices, a router, an embedding and vectors, whose forward takes what Hugging Face's take."""

    def __init__(self, *, first: str = "router") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.embedding = nn.Embedding(32, 16)
        self.attn = nn.ModuleDict({"wqkv": nn.Linear(16, 48)})
        self.mlp = nn.ModuleDict({first: nn.Linear(48, 4), "out": nn.Linear(48, 16)})
        self.lm_head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> types.SimpleNamespace:
        hidden = self.attn["wqkv"](self.embedding(input_ids))
        weight = self.mlp[self.first](hidden).softmax(-1).amax(-1, keepdim=True)
        logits = self.lm_head(self.mlp["out"](hidden) * weight)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def test_readme() -> None:
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    written = run("README.md", {"torch": torch, "muonmesh": mm, "model": model}, {"batches": [batch(), batch()]})
    assert isinstance(next(written)["optimizer"], mm.Muon)
    assert float(next(written)["norms"]) > 0
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_scripts_run_as_they_stand(tmp_path: Path) -> None:
    """On one process, on four ranks, and on one from what the four have saved."""
    for name, script in scripts("docs/get-started.md").items():
        (tmp_path / name).write_text(script)

    def last_loss(name: str, ranks: int = 1) -> float:
        return float(re.findall(r"^\d+ (\S+)", run_script(tmp_path / name, ranks=ranks), re.MULTILINE)[-1])

    sharded = last_loss("mesh.py", ranks=4)
    assert max(last_loss("train.py"), sharded) < 3 < math.log(256), "they learn"
    assert last_loss("resume.py") < sharded, "training goes on from what was saved"


@pytest.mark.slow
@pytest.mark.soak
def test_the_script_that_proves_a_rule(tmp_path: Path) -> None:
    """With the rule that the page shows in the file that the script imports, on two ranks of torchrun itself."""
    (rule,) = re.findall(r"```python\n([^`]*\"even-rows\"\)[^`]*)```", (ROOT / "docs/rules.md").read_text())
    (tmp_path / "my_rules.py").write_text("import muonmesh as mm\n" + rule)
    ((name, script),) = scripts("docs/rules.md").items()
    (tmp_path / name).write_text(script)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "even-rows: 2 ranks have the bits of one process in all 40 cases" in ran.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_page_of_the_algorithm(ranks: int) -> None:
    """Its program, whose ranks hold rows, takes the steps of muonmesh up to fp32's rounding."""
    (program,) = run("docs/algorithm.md", {})
    text = (ROOT / "docs/algorithm.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= 60
    torch.manual_seed(0)
    shapes = {"q": (48, 64), "up": (97, 40), "down": (40, 96), "idle": (8, 8)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}

    def cut(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        pieces = {name: tensor.tensor_split(ranks) for name, tensor in tensors.items()}
        return [{name: pieces[name][rank].clone() for name in tensors} for rank in range(ranks)]

    weights = cut({name: parameter.detach() for name, parameter in parameters.items()})
    momenta = cut({name: torch.zeros(shape) for name, shape in shapes.items()})
    owners = program["assign_owners"](shapes, ranks)
    exact = {"compute_dtype": torch.float32, "ns_coefficients": "polar_express", "ns_method": "standard"}
    group = {"params": [*parameters.items()], "algorithm": "muon"}
    optimizer = mm.Muon([group], lr=0.02, process_group="local", **exact)
    for _ in range(3):
        gradients = {name: spread(torch.Size(shape)) for name, shape in shapes.items()}
        gradients["idle"].zero_()
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        program["step"](weights, cut(gradients), momenta, owners, lr=0.02)
    for name, parameter in parameters.items():
        whole = torch.cat([shards[name] for shards in weights])
        torch.testing.assert_close(whole, parameter.detach(), rtol=0, atol=2e-5)  # an element moves by 0.004 a step


def backward_of_layer(model: nn.Module) -> None:
    """Give the parameters of a page's transformer layer gradients."""
    weight = next(model.parameters())
    model(torch.randn(2, 4, weight.shape[1], dtype=weight.dtype)).square().mean().backward()


def test_the_page_about_the_optimizer() -> None:
    written = run("docs/optimizer.md", {}, {}, {})
    names = next(written)
    for _ in range(2):  # the update is measured from the first call on
        backward_of_layer(names["model"])
        names["optimizer"].step()
        figures = names["optimizer"].metrics()
    text = (ROOT / "docs/optimizer.md").read_text()
    names_in_table = re.findall(r"^\| `((?:gradient|momentum|update)_\w+)` \|", text, re.MULTILINE)
    assert {f"muon/{name}" for name in names_in_table} == {key for key in figures if key.startswith("muon/")}
    assert len(names_in_table) == 4
    rates = {group["algorithm"]: group["lr"] for group in next(written)["optimizer"].param_groups}
    assert rates == {"muon": 6e-4, "adamw": 3e-4}
    names = next(written)
    optimizer, weight = names["optimizer"], names["model"].linear1.weight
    backward_of_layer(names["model"])
    optimizer.step()
    assert (weight.dtype, optimizer.state[weight]["master"].dtype) == (torch.bfloat16, torch.float32)


def test_the_page_about_learning_rates() -> None:
    written = run("docs/learning-rates.md", *[{}] * 6)
    for expected in (3e-4, 6e-4):
        names = next(written)
        assert names["optimizer"].param_groups[0]["lr"] == expected
    assert next(written)["lr"] == pytest.approx(0.02 * 2 / 12.8)
    for _ in range(2):
        names = next(written)
        for _ in range(3):
            names["optimizer"].step()
            names["scheduler"].step()
        assert len({group["lr"] / group["initial_lr"] for group in names["optimizer"].param_groups}) == 1
        assert names["optimizer"].param_groups[0]["momentum"] == 0.95


RATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": ("adamw", {"lr": 3e-4}),
    "torch.optim.Muon, 0.02": ("torch", {"lr": 0.02}),
    "torch.optim.Muon with": ("torch", {"lr": 3e-4, "adjust_lr_fn": "match_rms_adamw"}),
    "Moonlight": ("torch", {"lr": 3e-4, "adjust_lr_fn": "match_rms_adamw"}),
    "KellerJordan": ("keller_jordan", {"lr": 0.02}),
    'dion with `adjust_lr="spectral_norm"`': ("dion", {"lr": 0.02}),
    'dion with `adjust_lr="rms_norm"`': ("dion", {"lr": 3e-4, "adjust_lr": "rms_norm"}),
    "Megatron-Core, extra scale factor 0.2": ("megatron", {"lr": 3e-4, "muon_extra_scale_factor": 0.2}),
    "Megatron-Core, extra scale factor 1": ("megatron", {"lr": 3e-4}),
}


def spread(shape: torch.Size) -> Tensor:
    """Random numbers; a matrix has singular values over two decades, as momentum has."""
    tensor = torch.randn(shape)
    if tensor.ndim < 2:
        return tensor
    u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
    return u * torch.logspace(0, -2, len(s)) @ vh


def test_rates_from_other_packages() -> None:
    """Each line of the page's table steps as far as `convert_settings`, which keeps the package's coefficients."""
    text = (ROOT / "docs/learning-rates.md").read_text()
    lines = re.findall(r"^\| (.+?) \| `(mm\.from_model\(.+\))` \|$", text, re.MULTILINE)
    assert len(lines) == len(RATES)
    gradients = [spread(parameter.shape) for parameter in nn.TransformerEncoderLayer(64, 4).parameters()]

    def steps(make: Callable[[nn.Module], mm.Muon]) -> list[float]:
        """The Frobenius norm of one step of each matrix."""
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4)
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        moved = [float((p.detach() - old).norm()) for p, old in zip(model.parameters(), before, strict=True)]
        return [length for length, p in zip(moved, model.parameters(), strict=True) if p.ndim == 2]

    for source, line in lines:
        (name, settings), *others = [RATES[key] for key in RATES if source.startswith(key)]
        assert others == []
        converted = mm.convert_settings(name, **settings)
        steps_converted = steps(lambda model, converted=converted: mm.from_model(model, **converted))
        steps_of_line = steps(lambda model, line=line: eval(line, {"mm": mm, "model": model}))
        assert [steps_of_line[i] / steps_converted[i] for i in range(4)] == [pytest.approx(1.0, abs=0.11)] * 4, line


def test_the_page_about_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = run("docs/checkpoints.md", {}, {}, {}, {})
    names = next(written)
    model, optimizer = names["model"], names["optimizer"]
    assert (tmp_path / "checkpoints/1000/manifest.json").exists()
    backward_of_layer(model)
    optimizer.step()
    saved_state = {key: value.clone() for key, value in optimizer.state[model.linear1.weight].items()}
    next(written)
    mm.checkpoint.save("checkpoints/1000", model, optimizer)  # the file beside the folder is no obstacle
    next(written)  # DCP gives back what there was
    state = optimizer.state[model.linear1.weight]
    assert {key: torch.equal(value, state[key]) for key, value in saved_state.items()} == dict.fromkeys(
        saved_state, True
    )
    assert (tmp_path / "checkpoints/dcp/.metadata").exists()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        model.linear1.weight.zero_()
    next(written)  # the weights alone
    assert all(torch.equal(parameter, was) for parameter, was in zip(model.parameters(), weights, strict=True))


def test_the_page_about_memory(capsys: pytest.CaptureFixture[str]) -> None:
    *_, names = run("docs/memory.md", {}, {}, {})
    text, model = (ROOT / "docs/memory.md").read_text(), names["model"]
    assert capsys.readouterr().out.splitlines()[-1] in text
    assert names["optimizer"].param_groups[0]["stochastic_rounding"] == 0
    assert f"says {str(mm.from_model(model).explain()).split()[-5]} MB" in text
    adamw = torch.optim.AdamW(model.parameters())
    backward_of_layer(model)
    adamw.step()
    stored = sum(value.nbytes for state in adamw.state.values() for value in state.values())
    assert f"`torch.optim.AdamW` stores {stored / 1e6:.3g} MB" in text

    rows = {
        "fp32 weights": (torch.float32, {}),
        "bf16 weights": (torch.bfloat16, {}),
        "bf16 weights, fp32 copies": (torch.bfloat16, {"master_dtype": torch.float32}),
        "bf16 weights, fp32 copies, bf16 momentum": (
            torch.bfloat16,
            {"master_dtype": torch.float32, "state_dtype": torch.bfloat16},
        ),
        "fp32 weights, int8 momentum": (torch.float32, {"state_dtype": "int8"}),
    }
    for row, (dtype, settings) in rows.items():
        layer = copy.deepcopy(model).to(dtype)
        optimizer = mm.from_model(layer, **settings)
        layer.zero_grad()
        backward_of_layer(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bf16 weights without masters are warned of
            optimizer.step()
        weight, state = layer.linear1.weight, optimizer.state[layer.linear1.weight]
        assert weight.grad is not None
        sizes = [weight.nbytes, weight.grad.nbytes, state["momentum_buffer"].nbytes]
        sizes.append(state["master"].nbytes if "master" in state else 0)
        assert f"| {row} | {sum(sizes) // weight.numel()} |" in text


def module_of_ways() -> types.ModuleType:
    """Return benchmarks/studies/ways.py as a module."""
    spec = importlib.util.spec_from_file_location("ways", ROOT / "benchmarks" / "studies" / "ways.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_thirty_ways_print_what_was_recorded() -> None:
    script = module_of_ways()
    record = json.loads((ROOT / "benchmarks/results/ways.json").read_text())
    assert [title.partition(".")[0] for title in script.programs()] == [str(number) for number in range(1, 31)]
    assert set(record) == set(script.programs())
    others = [t for t, p in script.programs().items() if not script.same(script.expected(p), record[t]["printed"])]
    assert others == []


@pytest.mark.slow
@pytest.mark.parametrize("part", one_in(3, range(3)))
def test_the_ways_that_need_torch_alone_print_what_they_say(tmp_path: Path, part: int) -> None:
    script = module_of_ways()
    alone = {title: p for title, p in script.programs().items() if script.packages(p) <= {"torch", "transformers"}}
    assert len(alone) > 15
    alone = dict(list(alone.items())[part::3])
    outputs = {}
    for number, (title, program) in enumerate(alone.items()):
        (file := tmp_path / f"way{number}.py").write_text(program)
        outputs[title] = run_script(file, ranks=1 + program.startswith("# on two ranks")).splitlines()
    assert {t: lines for t, lines in outputs.items() if not script.same(script.expected(alone[t]), lines)} == {}


def test_the_commands_that_pages_show_are_understood() -> None:
    """Options and their types, not paths; nothing is run."""
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    shown = [
        shlex.split(line.partition(" > ")[0], comments=True)[1:]
        for path in (ROOT / "docs").glob("*.md")
        for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith("muonmesh ")
    ]
    assert len(shown) > 10
    for name, *rest in shown:
        if name.startswith("-"):
            assert name in {option for parameter in commands.params for option in parameter.opts}
        else:
            commands.commands[name].make_context(name, rest)


def test_the_page_about_clipping() -> None:
    from transformers import TrainerCallback

    model, logged, scaler = Net(), [], torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = mm.from_model(model, lr=0.01)
    first = {"optimizer": optimizer, "log": lambda **figures: logged.append(figures["norm"])}
    namespaces = (first, {}, {"scaler": scaler}, {"TrainerCallback": TrainerCallback})
    written = run("docs/clipping.md", *namespaces)

    def stepped() -> bool:
        optimizer.zero_grad()
        scaler.scale(model(**batch()).loss).backward()
        before = model.lm_head.weight.detach().clone()
        next(written)
        return not torch.equal(before, model.lm_head.weight)

    assert [stepped() for _ in range(3)] == [True] * 3
    assert logged[0] > 0
    assert issubclass(next(written)["Clip"], TrainerCallback)  # integrations/test_transformers.py shows what it does


def test_the_page_about_performance() -> None:
    explained, profiled = run("docs/performance.md", {}, {})
    assert explained["explanation"].orthogonalizations == 2
    assert explained["explanation"].state_bytes == 2 * 4 * 1024 * 4096
    text = (ROOT / "docs/performance.md").read_text()
    assert set(re.findall(r"^\| `(muonmesh: .*)` \|", text, re.MULTILINE)) == {
        WAITING,
        *(f"muonmesh: {part}" for part in NAMES.values()),
    }
    rows = {row.key: row.count for row in profiled["profile"].key_averages()}
    assert rows["muonmesh: AdamW and other elementwise rules"] == 1
    assert profiled["optimizer"].state[profiled["model"][0].bias]["step"] == 3, (
        "not the first step, which makes the plan"
    )
    tables = json.loads((ROOT / "benchmarks/results/step.json").read_text())["tables"]
    for name, peer in (("torch.optim.Muon 2.13", "torch.optim.Muon"), ("Muon of microsoft/dion", "dion Muon")):
        ratios = [tables[layout]["contenders"][peer]["ratio"] for layout in ("one", "ddp2", "fsdp2")]
        assert f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |" in text


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_page_about_the_simulated_device() -> None:
    (names,) = run("docs/internals/simulated.md", {})
    assert names["host"].tolist() == [1.0] * 4


def test_the_page_about_migrating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe makes an optimizer with the settings that the page speaks of; `test_migration` shows its steps."""
    monkeypatch.chdir(tmp_path)
    written = run("docs/migrating.md", *[{}] * 7)

    def first_settings(names: dict[str, Any]) -> tuple[Any, ...]:
        group = names["optimizer"].param_groups[0]
        return group["lr"], group["scale_mode"], group["weight_decay"]

    assert first_settings(next(written)) == (3e-4, "match_rms_adamw", 0.1)
    assert first_settings(names := next(written)) == (0.02, "original", 0.1)
    assert names["optimizer"].param_groups[1]["lr"] == 3e-4
    assert [group["lr"] for group in next(written)["optimizer"].param_groups] == [0.05, 0.22]
    assert first_settings(next(written)) == (3e-4, "match_rms_adamw", 0.1)
    assert next(written)["settings"]["lr"] == 0.02
    names = next(written)
    assert names["settings"]["scale_mode"] == "spectral"
    for parameter in names["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in (names["muon"], names["adamw"]):  # the steps of which the page speaks
        optimizer.step()
    momentum = {p: state["momentum_buffer"] for p, state in names["muon"].state.items()}
    loaded_state = next(written)["optimizer"].state
    assert momentum
    assert all(torch.equal(loaded_state[p]["momentum_buffer"], buffer) for p, buffer in momentum.items())


def test_the_page_about_rules() -> None:
    """In one process; `tests/numerics/test_rules_ranks.py` proves the page's rule on ranks."""
    model = Net()
    *_, names = run("docs/rules.md", {"model": model}, {}, {}, {})
    assert "lion" in [group["algorithm"] for group in names["optimizer"].param_groups]
    written = next(text for text in (ROOT / "docs/rules.md").read_text().split("```python\n") if "even-rows" in text)
    assert len(written.partition("```")[0].strip().splitlines()) <= 30
    optimizer = mm.from_model(model, lr=0.01, rule="even-rows", muon={"row_beta": 0.5})
    optimizer.metrics()
    model(**batch()).loss.backward()
    optimizer.step()
    assert optimizer.metrics()["muon/update_rms"] == pytest.approx(0.2 * 0.01, rel=0.05), "no larger in the first step"
    weight = model.attn["wqkv"].weight
    assert tuple(optimizer.state[weight]["row_norm"].shape) == (48, 1)
    assert torch.allclose(optimizer.state[weight]["mean_weights"], 0.5 * weight.detach())

    signs = mm.from_model(model, lr=0.01, overrides={"": {"algorithm": "sign-sgd"}}, adamw={"weight_decay": 0.0})
    gradients = {name: p.grad.sign() for name, p in model.named_parameters() if p.grad is not None}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    signs.step()
    for name, sign in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.01 * sign)

    optimizer = mm.from_model(model, lr=0.01, rule="as-large-as-the-weights", weight_decay=0.0)
    start = weight.detach().clone()
    optimizer.step()
    assert torch.allclose((weight.detach() - start).norm(), 0.01 * start.norm())


def test_the_page_about_variants() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=False))
    rules, powers = [], []
    for names in run("docs/variants.md", {"model": model}, {}):
        optimizer = names["optimizer"]
        model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
        optimizer.step()
        rules.append({name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]})
        powers.append([g["dynmuon_power"] for g in optimizer.param_groups if "dynmuon_power" in g])
    assert (rules[0]["lm_head.weight"], rules[0]["model.layers.0.mlp.up_proj.weight"]) == ("scion_sign", "normuon")
    assert rules[1]["model.layers.0.mlp.up_proj.weight"] == "dynmuon"
    assert powers[1] == [names["power_at"](1 / 1000)]


def test_the_page_about_qk_clip() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=False))
    (names,) = run("docs/qk-clip.md", {"model": model})
    names["clip"].threshold = 1e-8  # below the log-sum-exp of several keys, whatever the weights
    queries = model.model.layers[0].self_attn.q_proj.weight
    before = queries.detach().norm()
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    names["optimizer"].step()
    (largest,) = names["clip"].largest.values()
    assert largest.shape == (4,)
    assert queries.norm() < 1e-3 * before


@pytest.mark.filterwarnings(
    "ignore:Model. Muon trains these weights"
)  # the code of what is not in a file cannot be read
def test_the_page_about_groups() -> None:
    written = run("docs/groups.md", {}, {}, {}, {}, {}, {})
    assert [group["lr"] for group in next(written)["optimizer"].param_groups][:2] == [6e-4, 3e-4]
    shown = next(written)["groups"]
    reasons = {name: text for g in shown for name, text in zip(g["param_names"], g["reasons"], strict=True)}
    assert reasons["blocks.1.qkv.weight"] == "linear, fused: a forward cuts its output into 3 parts"
    assert reasons["head.weight"] == "output layer: in a forward, no other layer reads what it makes"
    groups_of_page = next(written)["optimizer"].param_groups
    assert [group["matrices"][0] for group in groups_of_page if "matrices" in group] == [("rows", 64, 64, 64)]
    groups = {name: group for group in next(written)["groups"] for name in group["param_names"]}
    assert groups["head.weight"]["algorithm"] == "muon"
    assert groups["blocks.0.norm.weight"]["lr"] == 1e-4
    fused = groups["blocks.0.qkv.weight"]
    assert fused["matrices"][fused["param_names"].index("blocks.0.qkv.weight")] == ("rows", 128, 64)
    attention = next(written)["Attention"]()
    attention.qkv, attention.bias_table = nn.Linear(768, 1280, bias=False), nn.Parameter(torch.zeros(4, 4))
    muon, adamw = mm.split_params(attention)
    assert (muon["param_names"], muon["matrices"]) == (["qkv.weight"], [("rows", 768, 256, 256)])
    assert adamw["param_names"] == ["bias_table"]
    assert [*next(written)["groups"].frozen] == ["embed.weight"]


def test_the_table_on_the_page_about_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file, whose code `split_params` reads."""
    _, script, _, table, *_ = re.split(r"^```(?:python)?\n", (ROOT / "docs/groups.md").read_text(), flags=re.MULTILINE)
    (tmp_path / "page_about_groups.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    printed = str(importlib.import_module("page_about_groups").groups).splitlines()
    shown = table.splitlines()
    assert len(shown) == 7
    assert [line for line in shown[:-1] if line not in printed] == []


def stamped_module(*shape: int, **attributes: Any) -> nn.Module:
    """A module whose weight carries Megatron's attributes."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(module.weight, name, value)
    return module


def shapes_on_the_page_about_layouts() -> list[dict[str, tuple[int, ...]]]:
    """Return the global shapes of the parameters of each snippet's optimizer, as it reads them."""
    rank, ranks, vocabulary = dist.get_rank(), (0, 1), 32003
    rows = vocabulary // 2 + (rank == 0)
    locals_ = {"layers.0.qkv.weight": (24, 16), "layers.0.proj.weight": (16, 8), "head.weight": (rows, 4096)}
    first = {
        "dp": 1,
        "tp": 2,
        "groups": [{"params": [(name, torch.empty(shape)) for name, shape in locals_.items()]}],
    }
    sizes = (448, 448)
    second = {
        "local": torch.zeros((1393, 2447)[rank]),
        "flat": torch.zeros(sizes[rank]),
        "q_layout": mm.FlatShards(MeshLayout.replicated((16, 8), ranks), ((Interval(0, 128, 0),), ()), sizes),
        "qkv_layout": mm.FlatShards(
            MeshLayout.replicated((96, 8), ranks), ((Interval(0, 320, 128),), (Interval(320, 448, 0),)), sizes
        ),
    }
    parallel = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    model = nn.ModuleDict({"fc": stamped_module(8, 6, **parallel)})
    third = {
        "model": model,
        "groups": [{"params": list(model.named_parameters())}],
        "tp": dist.group.WORLD,
        "dp": None,
        "expert_tp": None,
        "expert_dp": None,
    }
    fourth = {"model": nn.ModuleDict({"mlp": nn.ModuleDict({"router": stamped_module(4, 6)})})}
    fourth["model"]["mlp"].fc1_weight = stamped_module(8, 6, **parallel).weight
    replicas = {"ddp_model": nn.parallel.DistributedDataParallel(nn.ModuleDict({"fc": nn.Linear(6, 16, bias=False)}))}
    shapes = []
    pages = run("docs/layouts.md", {}, first, second, third, fourth), run("docs/to-owners.md", replicas)
    for number, names in enumerate(itertools.chain(*pages)):
        if number == 4:
            model = names["model"]
            names["optimizer"] = mm.Muon(list(model.named_parameters()), layouts=names["layouts"])
        shapes.append({member.name: member.storage.shape for member in placed_members(names["optimizer"])})
    return shapes


@pytest.mark.slow
def test_the_page_about_layouts(workers: Callable[[int], Pool]) -> None:
    declared = {"layers.0.qkv.weight": (48, 16), "layers.0.proj.weight": (16, 16), "head.weight": (32003, 4096)}
    flat = {"q.weight": (16, 8), "qkv.weight": (96, 8)}
    last = {"mlp.router.weight": (4, 6), "mlp.fc1_weight": (16, 6)}
    expected = [declared, flat, {"fc.weight": (16, 6)}, last, {"fc.weight": (16, 6)}]
    for sharded, *shapes in workers(2).run(shapes_on_the_page_about_layouts):
        assert sharded["layers.1.linear1.weight"] == (128, 64)
        assert shapes == expected


def differences_on_the_page_about_deepspeed(folder: str) -> list[str]:
    """Return the names of the weights that differ after the state has gone from one engine to the other."""
    from tests.hosts import deepspeed_engine as ds

    os.chdir(folder)
    ds.ready()
    written = run("docs/deepspeed.md", {}, {})
    names = next(written)
    torch.manual_seed(1)  # the other engine's model begins elsewhere
    before = ds.weights(names["engine"])
    next(written)
    assert len(before) == 7
    after = ds.weights(names["other"])
    names["engine"].destroy()
    names["other"].destroy()
    gc.collect()
    return [name for name, weight in before.items() if not torch.equal(weight, after[name])]


@pytest.mark.slow
def test_the_page_about_deepspeed(tmp_path: Path) -> None:
    pool = Pool(2)  # of its own: DeepSpeed keeps groups and threads for the life of a process
    try:
        assert pool.run(differences_on_the_page_about_deepspeed, str(tmp_path), timeout=240.0) == [[], []]
    finally:
        pool.close()


FUSED = {"fused": {"algorithm": "muon", "matrices": ("rows", 32, 32, 32)}}


def what_the_new_framework_trains(path: str) -> dict[str, Tensor]:
    """Run the page about a framework of one's own; return its weights, and the largest difference to one process."""
    gradients: list[dict[str, Tensor]] = []
    torch.manual_seed(0)
    sys.path.insert(0, str(ROOT / "examples"))  # of row_shards.py
    written = run("docs/new-framework.md", *[{"path": path} for _ in range(8)])
    next(written)
    names = next(written)
    host, groups = names["framework"], names["groups"]
    unregister(names["framework_modules"])
    alone = copy.deepcopy(host.model)
    backward = host.backward

    def recorded(loss: Tensor) -> None:
        backward(loss)
        total = {}
        for name, shard in host.shards.items():
            pieces = [torch.empty_like(rows) for rows in alone.get_parameter(name).tensor_split(2)]
            dist.all_gather(pieces, host.gradients[shard])
            total[name] = torch.cat(pieces)
        gradients.append(total)

    host.backward = recorded
    splits = {
        name: spec
        for group in groups
        if "matrices" in group
        for name, spec in zip(group["param_names"], group["matrices"], strict=True)
    }
    assert splits["fused"] == ("rows", 32, 32, 32)
    assert len([*written]) == 6
    optimizer = mm.from_model(alone, lr=0.02, process_group="local", overrides=FUSED)
    for step_gradients in gradients:
        for name, parameter in alone.named_parameters():
            parameter.grad = step_gradients[name].clone()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert {name: p for name, p in host.model.named_parameters() if not torch.equal(p, alone.get_parameter(name))} == {}
    return {name: p.detach() for name, p in alone.named_parameters()}


def test_the_page_about_a_new_framework(
    workers: Callable[[int], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    trained, same = workers(2).run(what_the_new_framework_trains, str(tmp_path / "saved"))
    assert len(trained) == 3
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    model = importlib.import_module("row_shards").Attention(32)
    optimizer = mm.from_model(model, lr=0.02, overrides=FUSED)
    mm.checkpoint.load(tmp_path / "saved", model, optimizer)
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())


# ------------------------------------------------------------------ words


def written_for_users() -> list[Path]:
    """Return the pages from which users read what to write, without those of evidence."""
    evidence = {"certificate", "gpu-results", "how-we-know", "models-tried", "thirty-ways"}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]
    return [page for page in pages if page.stem not in evidence]


def test_user_pages_are_short(tmp_path: Path) -> None:
    """15,000 words in all, those of programs and tables too; a table's bars and other signs are no words."""
    pages = [
        "optimizer",
        "learning-rates",
        "checkpoints",
        "memory",
        "training",
        "plan",
        "migrating",
        "variants",
        "rules",
        "qk-clip",
    ]
    texts = (page.read_text() for page in written_for_users())
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= 15_000, (
        "with a letter or digit"
    )
    paths = [ROOT / "docs" / f"{page}.md" for page in pages]
    script = ROOT / "docs" / "site" / "words.py"
    process = subprocess.run([sys.executable, script, *paths], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    (long := tmp_path / "long.md").write_text("word " * 901)
    process = subprocess.run([sys.executable, script, long], capture_output=True, text=True, check=False)
    assert process.returncode == 1


def test_files_that_maintainers_pages_name_are_there() -> None:
    file_names = {path.name for room in ("src", "tests", "benchmarks", "docs") for path in (ROOT / room).rglob("*.*")}
    for page in ("architecture", "kernels", "numerics", "planning", "simulated"):
        named = re.findall(r"`(?:[\w/]*/)?(\w+\.(?:py|c|h))`", (ROOT / f"docs/internals/{page}.md").read_text())
        assert set(named) - file_names == set(), page


def test_maintainers_pages_are_short() -> None:
    """By `wc -w`: 250 words a decision, 600 a report, 25,000 all that only maintainers and sceptics read."""

    def words(*patterns: str) -> dict[str, int]:
        pages = {path.name: path for pattern in patterns for path in ROOT.glob(pattern)}
        return {name: len(path.read_text().split()) for name, path in pages.items()}

    evidence = ("gpu-results", "how-we-know", "models-tried", "thirty-ways")
    others = words("docs/internals/*.md", "benchmarks/README.md", *(f"docs/{page}.md" for page in evidence))
    decisions, reports = words("docs/decisions/*.md"), words("benchmarks/reports/*.md")
    assert {name: count for name, count in decisions.items() if count > 250} == {}
    assert {name: count for name, count in reports.items() if count > 600} == {}
    assert sum(others.values()) + sum(decisions.values()) <= 25_000


# ------------------------------------------------------------------ pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "layout",
        "house",
        "step",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("timeline", "plan")),
    ],
)
def test_pictures_are_drawn_by_their_scripts(tmp_path: Path, name: str) -> None:
    script, picture = ROOT / "docs" / "images" / "draw" / f"{name}.py", tmp_path / f"{name}.png"
    run_script(script, "--picture", str(picture))
    colours = np.unique((255 * imread(picture)).astype(np.uint8).view(np.uint32))
    assert len(colours) > 20, "something is drawn"


def test_pictures_are_small() -> None:
    pictures = [*(ROOT / "docs" / "images").glob("*.*")]
    assert len(pictures) >= 5
    assert {picture.name: size for picture in pictures if (size := picture.stat().st_size) > 150_000} == {}
