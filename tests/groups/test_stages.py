"""A parameter's group does not depend on how the model is cut into pipeline stages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muonmesh.groups import split_params
from tests.support.on_ranks import on_ranks
from tests.support.samples import one_in

WIDTH, VOCAB = 8, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))


class Plain(nn.Module):
    """A block whose last linear is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


class Nested(nn.Module):
    """A block with a module for attention, and a feed-forward that is a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Experts(nn.Module):
    """A block of experts that are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.num_experts = Attention(), 3
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([Plain() for _ in range(3)])


class Turned(nn.Module):
    """A block that registers its attention last, and keeps linears in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attention = Attention()


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


BLOCKS: list[Callable[[], nn.Module]] = [
    Plain,
    Nested,
    Experts,
    Turned,
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16),
    feed_forward,
]
block_kinds = pytest.mark.parametrize(
    "block", BLOCKS, ids=["plain", "nested", "experts", "turned", "torch", "sequential"]
)


class Model(nn.Module):
    """Embedding, an input projection, blocks, norm, head; a stage has what it holds and None for the rest."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.layers = blocks
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)


def decided(groups: Any) -> dict[str, tuple[str, Any]]:
    """Name → its group and its matrices."""
    return {
        name: (group["name"], group["matrices"][i] if "matrices" in group else None)
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


def runs(count: int) -> Iterator[tuple[int, int]]:
    """Every contiguous run of `count` things: every stage of every cut."""
    for first in range(count):
        for end in range(first + 1, count + 1):
            yield first, end


def check_stage(stage: nn.Module, whole: dict[str, Any], *, rename: Callable[[str], str] = lambda name: name) -> None:
    if next(stage.parameters(), None) is None:
        return
    renamed = {rename(name): entry for name, entry in decided(split_params(stage)).items()}
    assert renamed == {name: whole[name] for name in renamed}, stage


@block_kinds
@pytest.mark.parametrize(
    "container",
    [nn.ModuleList, *(pytest.param(other, marks=pytest.mark.soak) for other in (nn.Sequential, nn.ModuleDict))],
)
@pytest.mark.parametrize("absent", one_in(2, ["deleted", "none"]))
def test_a_stage_of_a_model_that_keeps_its_class(block: Callable[[], nn.Module], container: Any, absent: str) -> None:
    """torchtitan's way: the whole model is copied, and what belongs to other stages is set to None or removed."""
    count = 4
    blocks = [block() for _ in range(count)]
    stack = nn.ModuleDict({str(i): b for i, b in enumerate(blocks)}) if container is nn.ModuleDict else None
    model = Model(stack if stack is not None else container(*([blocks] if container is nn.ModuleList else blocks)))
    whole = decided(split_params(model))
    assert whole["output.weight"][0] == "adamw.head"
    assert whole["project.weight"][0] == "muon"
    parts = ["embed", "project", *map(str, range(count)), "norm", "output"]
    for first, end in runs(len(parts)):
        stage, stage_parts = copy.deepcopy(model), set(parts[first:end])
        for name in ("embed", "project", "norm", "output"):
            if name not in stage_parts:
                setattr(stage, name, None) if absent == "none" else delattr(stage, name)
        block_numbers = [i for i in range(count) if str(i) in stage_parts]
        if container is nn.ModuleDict:
            for i in range(count):
                if i not in block_numbers:
                    del stage.layers[str(i)]
            check_stage(stage, whole)
        else:
            inner = [stage.layers[i] for i in block_numbers]
            stage.layers = container(inner) if container is nn.ModuleList else container(*inner)

            def rename(name: str, block_numbers: list[int] = block_numbers) -> str:
                head, _, rest = name.partition(".")
                number, _, rest = rest.partition(".")
                return f"layers.{block_numbers[int(number)]}.{rest}" if head == "layers" else name

            check_stage(stage, whole, rename=rename)


@block_kinds
def test_a_stage_of_a_sequential(block: Callable[[], nn.Module]) -> None:
    """A slice keeps the names; one of a ModuleList does not. Some stages hold one block alone, or the head alone."""
    parts = [nn.Embedding(VOCAB, WIDTH), *(block() for _ in range(3)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)]
    model = nn.Sequential(*parts)
    whole = decided(split_params(model))
    assert whole["5.weight"][0] == "adamw.head"
    for first, end in runs(len(parts)):
        check_stage(model[first:end], whole)
        moved = lambda name, first=first: f"{int(name.split('.')[0]) + first}.{name.partition('.')[2]}"  # noqa: E731
        check_stage(nn.ModuleList(parts[first:end]), whole, rename=moved)
        wrapped = nn.ModuleDict({"stage": nn.Sequential(*parts[first:end])})
        check_stage(wrapped, whole, rename=lambda name, moved=moved: moved(name.removeprefix("stage.")))


@block_kinds
def test_one_block_is_no_model(block: Callable[[], nn.Module]) -> None:
    """However a stage of one block is held, none of its linears is a head."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block()

    for stage in (
        block(),
        Stage(),
        nn.Sequential(block()),
        nn.ModuleList([block()]),
        nn.ModuleDict({"3": block()}),
        nn.Sequential(nn.Sequential(block())),
        nn.ModuleDict({"layers": nn.ModuleList([block()])}),
        torch.compile(nn.Sequential(torch.compile(block()))),
    ):
        assert "adamw.head" not in {group for group, _ in decided(split_params(stage)).values()}


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
CASES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    # class, settings, its blocks, what comes before them, what comes after
    ("LlamaForCausalLM", SMALL, "model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"]),
    ("LlamaForSequenceClassification", SMALL, "model.layers", ["model.embed_tokens"], ["model.norm", "score"]),
    ("LlamaModel", SMALL, "layers", ["embed_tokens"], ["norm"]),
    ("MixtralForCausalLM", SMALL, "model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"]),
    ("GPTNeoXForCausalLM", SMALL, "gpt_neox.layers", ["gpt_neox.embed_in"], ["gpt_neox.final_layer_norm", "lm_head"]),
    (
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False},
        "transformer.h",
        ["transformer.wte", "transformer.wpe"],
        ["transformer.ln_f", "lm_head"],
    ),
    ("BertForMaskedLM", {**SMALL, "tie_word_embeddings": False}, "bert.encoder.layer", ["bert.embeddings"], ["cls"]),
    ("RobertaForSequenceClassification", SMALL, "roberta.encoder.layer", ["roberta.embeddings"], ["classifier"]),
    ("ViTForImageClassification", SMALL, "vit.layers", ["vit.embeddings"], ["vit.layernorm", "classifier"]),
]


@pytest.mark.parametrize("case", one_in(2, [(case,) for case in CASES]), ids=[case[0] for case in CASES])
@pytest.mark.parametrize("how", ["within", pytest.param("none", marks=pytest.mark.soak), "taken out"])
def test_a_stage_of_a_transformers_model(case: tuple[str, dict[str, Any], str, list[str], list[str]], how: str) -> None:
    """Cut within its class; with the base model gone where nothing of it is left; or taken out into a Sequential."""
    name, settings, path, before, after = case
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, name).config_class(**settings))
    whole = decided(split_params(model))
    count = len(model.get_submodule(path))
    parts = [*before, *(f"{path}.{i}" for i in range(count)), *after]
    if how == "taken out" and not isinstance(model.get_submodule(after[-1]), nn.Linear):
        # A head that is a module of its own is one only by what the model around it says.
        parts = parts[: -len(after)]
    for first, end in runs(len(parts)):
        stage_parts = parts[first:end]
        if how == "taken out":
            stage: nn.Module = nn.Sequential(*(model.get_submodule(part) for part in stage_parts))

            def rename(name: str, stage_parts: list[str] = stage_parts) -> str:
                number, _, rest = name.partition(".")
                return f"{stage_parts[int(number)]}.{rest}"

            check_stage(stage, whole, rename=rename)
            continue
        stage = copy.deepcopy(model)
        for part in {*before, *after} - set(stage_parts):
            parent, _, child = part.rpartition(".")
            setattr(stage.get_submodule(parent), child, None)
        blocks = stage.get_submodule(path)
        block_numbers = [i for i in range(count) if f"{path}.{i}" in stage_parts]
        parent, _, child = path.rpartition(".")
        setattr(stage.get_submodule(parent), child, nn.ModuleList([blocks[i] for i in block_numbers]))
        base = path.split(".")[0]
        if how == "none" and "." in path and next(getattr(stage, base).parameters(), None) is None:
            setattr(stage, base, None)

        def renumbered(name: str, block_numbers: list[int] = block_numbers, path: str = path) -> str:
            if not name.startswith(path + "."):
                return name
            number, _, rest = name.removeprefix(path + ".").partition(".")
            return f"{path}.{block_numbers[int(number)]}.{rest}"

        check_stage(stage, whole, rename=renumbered)


# What cannot be known from a stage


class Net(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, out)


def test_the_last_layer_of_a_model_without_blocks_is_a_guess_that_says_so() -> None:
    def heads(model: nn.Module) -> dict[str, str]:
        return {
            name: reason
            for group in split_params(model)
            for name, reason in zip(group["param_names"], group["reasons"], strict=True)
            if group["name"] == "adamw.head"
        }

    for model, name in (
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), "2.weight"),
        (Net(3), "last.weight"),
    ):
        (head,) = heads(model).items()
        assert head[0] == name
        assert "a guess" in head[1]
    # what comes out as wide as it went in may be followed by itself: a block, not a model
    assert heads(Net(4)) == {}
    assert heads(nn.Sequential(nn.Linear(4, 4))) == {}


# What the whole model decided, for a stage


class Traceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), feed_forward()) for _ in range(3)])
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_traced_stage_is_refused_and_gets_what_the_whole_model_decided() -> None:
    """`pipeline` and torch.export keep no class of a module, so an embedding looks like any matrix."""
    model = Traceable()
    whole = split_params(model, muon={"lr": 0.02})
    cut = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2)}
    traced = pipeline(model, mb_args=(torch.zeros(2, 4, dtype=torch.long),), split_spec=cut)
    decisions: dict[str, Any] = {}
    for number in range(3):
        stage = traced.get_stage_module(number)
        message = r"weight: The module of this parameter was traced .* Write split_params\(model\)\.held_by\(stage\)"
        with pytest.raises(ValueError, match=message):
            split_params(stage)
        groups = whole.held_by(stage)
        by_name = dict(stage.named_parameters())
        for group in groups:
            assert all(by_name[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
            assert len(group["reasons"]) == len(group["params"])
        assert [g["lr"] for g in groups if g["algorithm"] == "muon"] == [0.02]
        decisions |= decided(groups)
        assert set(decided(groups)) == set(by_name)
    assert decisions == decided(whole)


def test_a_scripted_model_is_refused_and_gets_what_the_model_decided() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, VOCAB))
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        scripted = torch.jit.script(model)
    whole = split_params(model)
    with pytest.raises(ValueError, match=r"weight: The module of this parameter was traced"):
        split_params(scripted)
    assert decided(whole.held_by(scripted)) == decided(whole)


def test_what_the_whole_model_decided_reaches_tied_and_frozen_parameters_and_refuses_strangers() -> None:
    model = Model(nn.ModuleList([Plain(), Plain()]))
    model.output.weight = model.embed.weight
    model.norm.requires_grad_(False)
    whole = split_params(model)
    last = nn.ModuleDict({"norm": model.norm, "output": nn.Linear(WIDTH, VOCAB, bias=False)})
    groups = whole.held_by(torch.compile(last))
    assert decided(groups) == {"output.weight": ("adamw.embeddings", None)}  # as the embedding it is tied to
    assert set(groups.frozen) == {"norm.weight", "norm.bias"}
    with pytest.raises(
        ValueError, match=r"^head\.weight: The stage holds this parameter, and the groups of the whole model have none"
    ):
        whole.held_by(nn.ModuleDict({"head": nn.Linear(WIDTH, VOCAB, bias=False)}))
    with pytest.raises(ValueError, match=r"^output\.weight: found shape \(3, 8\); needed \(11, 8\)"):
        whole.held_by(nn.ModuleDict({"output": nn.Linear(WIDTH, 3, bias=False)}))
    with pytest.raises(TypeError, match="found a list; needed a torch"):
        whole.held_by([last])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"none with requires_grad"):
        whole.held_by(nn.ModuleDict({"norm": model.norm}))


def test_a_tie_that_sharding_has_broken_is_refused() -> None:
    """Else one of both weights would be trained by nobody."""
    model = Model(nn.ModuleList([Plain()]))
    model.output.weight = model.embed.weight
    whole = split_params(model)
    assert "embed.weight" in decided(whole.held_by(model))
    model.output.weight = nn.Parameter(model.embed.weight.detach().clone())
    message = r"^output\.weight: found a parameter apart from embed\.weight, to which it was tied .*Tie them again"
    with pytest.raises(ValueError, match=message):
        whole.held_by(model)
    model.output.weight = model.embed.weight
    assert "embed.weight" in decided(whole.held_by(model))


@on_ranks(2)
def test_parallelize_module_breaks_a_tie() -> None:
    model = Model(nn.ModuleList([Plain()]))
    model.output.weight = model.embed.weight
    whole = split_params(model)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    message = r"^output\.weight: found a parameter apart from embed\.weight, to which it was tied"
    with pytest.raises(ValueError, match=message):
        whole.held_by(model)
