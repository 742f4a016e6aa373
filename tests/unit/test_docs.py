"""What the documents name exists, what they say to write runs, and their pictures are small."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from matplotlib.image import imread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from muonmesh.groups import unregister
from muonmesh.layout import Interval, MeshLayout
from muonmesh.step.connection import placed_members
from tests.pages import run, snippets
from tests.workers import Pool

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ONE_PROCESS = (
    "README.md",
    "docs/optimizer.md",
    "docs/clipping.md",
    "docs/groups.md",
    "docs/rules.md",
    "docs/variants.md",
    "docs/performance.md",
    "docs/migrating.md",
    "docs/internals/simulated.md",
)
RANKS = ("docs/layouts.md", "docs/deepspeed.md", "docs/new-framework.md")
HOSTS = ("docs/hosts.md",)  # by tests/hosts/test_page.py, where the hosts are installed
MEGATRON = ("docs/megatron.md",)  # by tests/megatron/test_page.py, where Megatron-Core is installed


def test_every_test_that_the_documents_name_exists() -> None:
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", written)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for path in DOCUMENTS for name in re.findall(r"`(?:[\w/]*/)?(test_\w+)", path.read_text())}
    assert len(named) > 20
    assert sorted(named - defined) == []


def test_the_page_about_gpu_results_names_what_runs() -> None:
    page = (ROOT / "docs" / "gpu-results.md").read_text()
    assert set(re.findall(r"`(test_\w+\.py)`", page)) == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu-result.md").read_text()
    for text in (page, template):
        assert "make test-gpu" in text
        assert "modelled-and-measured.md" in text


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in [*DOCUMENTS, ROOT / "benchmarks" / "README.md"]
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


def test_what_a_page_loads_and_where_it_links_is_checked(tmp_path: Path) -> None:
    fine = '<link rel="stylesheet" href="a.css"><a href="#here" id="here"></a><a href="https://x.org">x</a>'
    (tmp_path / "a.css").write_text("p { background: url(b.png) }")
    page = tmp_path / "index.html"

    def found() -> list[str]:
        script = ROOT / "docs" / "site" / "check.py"
        done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == (0 if "nothing is loaded" in done.stdout else 1)
        return [] if done.returncode == 0 else done.stdout.splitlines()

    page.write_text(fine)
    assert found() == []
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/f.css';")
    wrong = '<script src="//cdn.example/x.js"></script><img src="gone.png"><a href="no.html"></a><a href="#no"></a>'
    page.write_text(fine + wrong)
    assert [line.split(": ")[1].split(",")[0] for line in found()] == [
        "loads //cdn.example/x.js from elsewhere",
        "loads gone.png",
        "links to no.html",
        "links to #no",
        "loads https://fonts.example/f.css",
    ]


# ------------------------------------------------------------------ snippets


def test_every_page_with_snippets_is_run() -> None:
    pages = {str(path.relative_to(ROOT)) for path in DOCUMENTS if "```python" in path.read_text()}
    assert pages == {*ONE_PROCESS, *RANKS, *HOSTS, *MEGATRON}


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


def test_the_page_about_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    states = {"get_model_state_dict": get_model_state_dict, "get_optimizer_state_dict": get_optimizer_state_dict}
    *_, names = run("docs/optimizer.md", {"torch": torch, "model": Net(), "n": 10}, {}, {}, {}, states, {})
    assert isinstance(names["optimizer"], mm.Muon)
    for checkpoint in ("1000", "of-torch"):
        assert (tmp_path / "checkpoint" / checkpoint / ".metadata").exists()
    assert float(names["norms"]) == 0  # there were no gradients


def test_the_page_about_clipping() -> None:
    from transformers import TrainerCallback

    model, logged, scaler = Net(), [], torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = mm.from_model(model, lr=0.01)
    first = {"optimizer": optimizer, "log": lambda **what: logged.append(what["norm"])}
    given = (first, {}, {"scaler": scaler}, {"TrainerCallback": TrainerCallback})
    written = run("docs/clipping.md", *given)

    def stepped() -> bool:
        optimizer.zero_grad()
        scaler.scale(model(**batch()).loss).backward()
        before = model.lm_head.weight.detach().clone()
        next(written)
        return not torch.equal(before, model.lm_head.weight)

    assert [stepped() for _ in range(3)] == [True] * 3
    assert logged[0] > 0
    assert issubclass(next(written)["Clip"], TrainerCallback)  # `test_trainer` shows what it does


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_page_about_performance() -> None:
    *_, names = run("docs/performance.md", {})
    assert names["run"].launches > 0


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_page_about_the_simulated_device() -> None:
    (names,) = run("docs/internals/simulated.md", {})
    assert names["host"].tolist() == [1.0] * 4


def test_the_page_about_migrating() -> None:
    """Each recipe makes an optimizer with the settings that the page speaks of; `test_migration` shows its steps."""
    written = run("docs/migrating.md", {"model": Net(first="up")}, {}, {}, {}, {}, {}, {}, {}, {})

    def found(names: dict[str, Any]) -> tuple[Any, ...]:
        group = names["optimizer"].param_groups[0]
        return group["lr"], group["scale_mode"], group["weight_decay"]

    assert found(next(written)) == (0.02, "original", 0.0)
    assert found(next(written)) == (3e-4, "match_rms_adamw", 0.1)
    assert found(names := next(written)) == (0.02, "original", 0.1)
    assert names["optimizer"].param_groups[1]["lr"] == 3e-4
    assert [group["lr"] for group in next(written)["optimizer"].param_groups] == [0.05, 0.22, 0.6]
    assert found(next(written)) == (3e-4, "match_rms_adamw", 0.1)
    assert (next(written)["settings"]["lr"], next(written)["settings"]["scale_mode"]) == (0.02, "spectral")
    names = next(written)
    assert found(names) == (0.02, "original", 0.1)
    for parameter in names["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for theirs in (names["muon"], names["adamw"]):  # the "some steps" of which the page speaks
        theirs.step()
    momentum = {p: state["momentum_buffer"] for p, state in names["muon"].state.items()}
    taken = next(written)["optimizer"].state
    assert momentum
    assert all(torch.equal(taken[p]["momentum_buffer"], kept) for p, kept in momentum.items())


def test_the_page_about_rules() -> None:
    """In one process; `tests/parallel/test_rules.py` proves the page's rule on ranks."""
    model = Net()
    *_, names = run("docs/rules.md", {"model": model}, {}, {}, {}, {}, {})
    assert "lion" in [group["algorithm"] for group in names["optimizer"].param_groups]
    written = next(text for text in (ROOT / "docs/rules.md").read_text().split("```python\n") if "even-rows" in text)
    assert len(written.partition("```")[0].strip().splitlines()) <= 30
    optimizer = mm.from_model(model, lr=0.01, rule="even-rows", muon={"row_beta": 0.5})
    model(**batch()).loss.backward()
    optimizer.step()
    weight = model.attn["wqkv"].weight
    assert tuple(optimizer.state[weight]["row_norm"].shape) == (48, 1)
    assert torch.allclose(optimizer.state[weight]["mean_weights"], 0.5 * weight.detach())

    optimizer = mm.from_model(model, lr=0.01, rule="as-large-as-the-weights", weight_decay=0.0)
    before = weight.detach().clone()
    optimizer.step()
    assert torch.allclose((weight.detach() - before).norm(), 0.01 * before.norm())


def test_the_page_about_variants() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20, tie_word_embeddings=False))
    for names in run("docs/variants.md", {"model": model}, {}):
        optimizer = names["optimizer"]
        model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
        optimizer.step()
    assert [tuple(some.shape) for some in names["clip"].largest.values()] == [(4,)]
    rules = {name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]}
    assert (rules["lm_head.weight"], rules["model.layers.0.mlp.up_proj.weight"]) == ("scion_sign", "normuon")


def test_the_page_about_groups() -> None:
    written = run("docs/groups.md", {"model": Net()}, {"nn": nn}, {})
    assert [group["lr"] for group in next(written)["optimizer"].param_groups][:2] == [0.02, 3e-4]
    attention = next(written)["Attention"]()
    attention.qkv, attention.bias_table = nn.Linear(768, 1280, bias=False), nn.Parameter(torch.zeros(4, 4))
    muon, adamw = mm.split_params(attention)
    assert (muon["param_names"], muon["matrices"]) == (["qkv.weight"], [("rows", 768, 256, 256)])
    assert adamw["param_names"] == ["bias_table"]
    groups = {name: group for group in next(written)["groups"] for name in group["param_names"]}
    assert groups["lm_head.weight"]["algorithm"] == "muon"
    assert groups["mlp.router.weight"]["lr"] == 1e-4
    place = groups["attn.wqkv.weight"]["param_names"].index("attn.wqkv.weight")
    assert groups["attn.wqkv.weight"]["matrices"][place] == ("heads", 3, 0)


def stamped(*shape: int, **attributes: Any) -> nn.Module:
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
        "mm": mm,
        "init_device_mesh": init_device_mesh,
        "Replicate": Replicate,
        "Shard": Shard,
        "device_type": "cpu",
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
    model = nn.ModuleDict({"fc": stamped(8, 6, **parallel)})
    third = {
        "model": model,
        "groups": [{"params": list(model.named_parameters())}],
        "tp": dist.group.WORLD,
        "dp": None,
        "expert_tp": None,
        "expert_dp": None,
    }
    fourth = {"model": nn.ModuleDict({"mlp": nn.ModuleDict({"router": stamped(4, 6)})})}
    fourth["model"]["mlp"].fc1_weight = stamped(8, 6, **parallel).weight
    replicas = {"ddp_model": nn.parallel.DistributedDataParallel(nn.ModuleDict({"fc": nn.Linear(6, 16, bias=False)}))}
    found = []
    for number, names in enumerate(run("docs/layouts.md", first, second, replicas, third, fourth)):
        if number == 4:
            model = names["model"]
            names["optimizer"] = mm.Muon(list(model.named_parameters()), layouts=names["layouts"])
        found.append({member.name: member.storage.shape for member in placed_members(names["optimizer"])})
    return found


@pytest.mark.slow
def test_the_page_about_layouts(workers: Callable[[int], Pool]) -> None:
    declared = {"layers.0.qkv.weight": (48, 16), "layers.0.proj.weight": (16, 16), "head.weight": (32003, 4096)}
    flat = {"q.weight": (16, 8), "qkv.weight": (96, 8)}
    last = {"mlp.router.weight": (4, 6), "mlp.fc1_weight": (16, 6)}
    expected = [declared, flat, {"fc.weight": (16, 6)}, {"fc.weight": (16, 6)}, last]
    assert workers(2).run(shapes_on_the_page_about_layouts) == [expected] * 2


def differences_on_the_page_about_deepspeed(folder: str) -> list[str]:
    """Return the names of the weights that differ after the state has gone from one engine to the other."""
    from tests.hosts import deepspeed_engine as ds

    model, given = ds.build(), [ds.given(step, 0, dist.get_rank()) for step in range(2)]
    written = run("docs/deepspeed.md", {"model": model, "batches": given}, {"path": folder})
    ds.ready()
    names = next(written)
    engine = names["engine"]
    before = ds.weights(engine)
    assert not torch.equal(before["lone.weight"], ds.values()["lone.weight"])
    config = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    other = names["initialize"](model=ds.build(), config=config, optimizer={"lr": 3e-4, "weight_decay": 0.1})[0]
    names["other_engine"] = other
    next(written)
    after = ds.weights(other)
    engine.destroy()
    other.destroy()
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
    written = run("docs/new-framework.md", *[{"path": path} for _ in range(7)])
    next(written)
    names = next(written)
    host, groups = names["host"], names["groups"]
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
    assert len([*written]) == 5
    one = mm.from_model(alone, lr=0.02, process_group="local", overrides=FUSED)
    for given in gradients:
        for name, parameter in alone.named_parameters():
            parameter.grad = given[name].clone()
        one.clip_grad_norm_(1.0)
        one.step()
    assert {name: p for name, p in host.model.named_parameters() if not torch.equal(p, alone.get_parameter(name))} == {}
    return {name: p.detach() for name, p in alone.named_parameters()}


def test_the_page_about_a_new_framework(workers: Callable[[int], Pool], tmp_path: Path) -> None:
    trained, same = workers(2).run(what_the_new_framework_trains, str(tmp_path / "saved"))
    assert len(trained) == 3
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    names: dict[str, Any] = {}
    exec(snippets("docs/new-framework.md")[0], names)
    model = names["Attention"](32)
    optimizer = mm.from_model(model, lr=0.02, overrides=FUSED)
    mm.checkpoint.load(tmp_path / "saved", model, optimizer)
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())


# ------------------------------------------------------------------ pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["layout", "house", *(pytest.param(name, marks=pytest.mark.soak) for name in ("timeline", "plan"))]
)
def test_pictures_are_drawn_by_their_scripts(tmp_path: Path, name: str) -> None:
    script, picture = ROOT / "docs" / "images" / "draw" / f"{name}.py", tmp_path / f"{name}.png"
    subprocess.run([sys.executable, script, "--picture", picture], check=True, timeout=120)
    colours = {tuple(pixel) for row in imread(picture) for pixel in row}
    assert len(colours) > 20, "something is drawn"


def test_pictures_are_small() -> None:
    pictures = [*(ROOT / "docs" / "images").glob("*.*")]
    assert len(pictures) >= 5
    assert {picture.name: size for picture in pictures if (size := picture.stat().st_size) > 150_000} == {}
