"""What a weight is, as one forward shows it: models by their kind, as other projects write them."""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import muonmesh as mm
from muonmesh.groups.example import facts_of_example
from tests.support.models import Calls, OpaqueProduct
from tests.support.reference import split
from tests.support.workers import Pool

COVERS = (
    "groups.facts.facts_of_graph",
    "groups.graph.nodes_behind",
    "groups.forms.through",
    "groups.products.learn",
    "groups.facts.last_layers",
    "groups.cuts.parts_made",
    "groups.example.facts_of_example",
)

HEAD, INPUT, VECTOR, ADAMW = "adamw.head", "adamw.embeddings", "adamw.vectors", "adamw.matrices"
THREE = ("rows", 16, 16, 16)


def roles(model: nn.Module, example: Any) -> dict[str, Any]:
    """The split of each matrix of Muon, or the group of AdamW; nothing may be left to a guess."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*found 0 matrices")  # of models that are ends only
        groups = mm.split_params(model, example=example)
    return {
        name: group["matrices"][i] if "matrices" in group else group["name"]
        for group in groups
        for i, name in enumerate(group["param_names"])
        if group["params"][i].dim() > 1
    }


def reason_by_example(model: nn.Module, example: Any, name: str) -> str:
    groups = mm.split_params(model, example=example)
    return next(g["reasons"][g["param_names"].index(name)] for g in groups if name in g["param_names"])


def tokens(forward: Callable[..., Any], width: int = 16, **layers: nn.Module | nn.Parameter) -> nn.Module:
    """Two blocks of these layers between an embedding and an output layer."""

    def run(self: Any, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)

    blocks = nn.ModuleList(copy.deepcopy(Calls(forward, **layers)) for _ in range(2))
    return Calls(run, embed=nn.Embedding(9, width), blocks=blocks, out=nn.Linear(width, 9))


IDS = (torch.arange(10).view(2, 5) % 9,)
FUSED = "blocks.1.fused.weight"


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def by_heads(x: Tensor, heads: int = 4) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotary_cat(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    angle = torch.arange(a.shape[-2] * a.shape[-1]).view(a.shape[-2:]).float()
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def rotary_pairs(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


def rotary_unbound(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a - b, a + b), dim=-1).flatten(-2)


def rotary_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.ones(pairs.shape[-1], dtype=torch.cfloat)).flatten(-2)


def starred(self: Any, x: Tensor) -> Tensor:
    q, k, v = (self.q(x), *self.fused(x).chunk(2, dim=-1))
    return self.proj(attention(q, k, v))


def grouped_queries(self: Any, x: Tensor) -> Tensor:
    size = 2 * 4
    q, k, v = self.fused(x).split([16, size, size], dim=-1)
    k, v = (by_heads(part, 2).repeat_interleave(2, dim=1) for part in (k, v))
    return self.proj(attention(by_heads(q), k, v).transpose(1, 2).flatten(-2))


def head_by_head(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.fused(x).view(*x.shape[:2], 4, 3 * 4).transpose(1, 2).chunk(3, dim=-1)
    return self.proj(attention(q, k, v).transpose(1, 2).flatten(-2))


def gqa_by_group(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.fused(x).unflatten(-1, (2, 16)).split([8, 4, 4], dim=-1)
    mixed = attention(q.flatten(-2), k.repeat(1, 1, 1, 2).flatten(-2), v.repeat(1, 1, 1, 2).flatten(-2))
    return self.proj(mixed)


def permuted(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.fused(x).reshape(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return self.proj(attention(q, k, v).transpose(1, 2).flatten(-2))


def indexed(self: Any, x: Tensor) -> Tensor:
    qkv = self.fused(x).view(*x.shape[:2], 3, 4, 4)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    return self.proj(attention(rotary_cat(q), rotary_cat(k), v).transpose(1, 2).flatten(-2))


def sliced(self: Any, x: Tensor) -> Tensor:
    qkv = self.fused(x)
    return self.proj(attention(qkv[..., :16], qkv[..., 16:32], qkv[..., 32:]))


def gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.fused(x).chunk(2, dim=-1)
    return self.proj(F.silu(gate) * up)


def gated_alternating(self: Any, x: Tensor) -> Tensor:
    fused = self.fused(x)
    return self.proj(F.silu(fused[..., ::2]) * (fused[..., 1::2] + 1))


def gated_by_glu(self: Any, x: Tensor) -> Tensor:
    return self.proj(F.glu(self.fused(x)))


def activated_first(self: Any, x: Tensor) -> Tensor:
    a, b = F.dropout(F.gelu(self.fused(x)), 0.1).split(16, dim=-1)
    return self.proj(a * b)


def through_depthwise(self: Any, x: Tensor) -> Tensor:
    z, xbc = self.fused(x).split([16, 24], dim=-1)
    a, b, c = F.silu(self.conv(xbc.mT)[..., :-1].mT).split([16, 4, 4], dim=-1)
    return self.proj(F.silu(z) * (a + (b * c).sum(-1, keepdim=True)))


def convolved(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.conv(x.mT).chunk(3, 1)
    a, b = self.fused(x).chunk(2, -1)
    return self.proj(attention(q, k, v).mT + a * b)


def cut_before(self: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ rows.T for rows in self.fused.weight.chunk(3))
    return self.proj(attention(q, k, v))


def cut_before_by_slices(self: Any, x: Tensor) -> Tensor:
    weight, bias = self.fused.weight, self.fused.bias
    q, k, v = (F.linear(x, weight[i : i + 16], bias[i : i + 16]) for i in (0, 16, 32))
    return self.proj(attention(q, k, v))


def cut_before_and_behind(self: Any, x: Tensor) -> Tensor:
    q, (k, v) = x @ self.fused.weight[:16].T, (x @ self.fused.weight[16:].T).chunk(2, -1)
    return self.proj(attention(q, k, v))


def cut_of(out: int, forward: Callable[..., Any], **more: nn.Module) -> nn.Module:
    return tokens(forward, fused=nn.Linear(16, out), proj=nn.Linear(16, 16), **more)


CUTS: dict[str, tuple[nn.Module, Any]] = {
    "keys and values in a starred tuple": (cut_of(32, starred, q=nn.Linear(16, 16)), ("rows", 16, 16)),
    "grouped queries": (cut_of(32, grouped_queries), ("rows", 16, 8, 8)),
    "q, k, v head by head": (cut_of(48, head_by_head), ("interleaved", 3, 0, 4)),
    "a group of queries, a key, a value": (cut_of(32, gqa_by_group), ("interleaved", (8, 4, 4), 0)),
    "unbound after a permutation": (cut_of(48, permuted), THREE),
    "indexed, then rotated": (cut_of(48, indexed), THREE),
    "sliced": (cut_of(48, sliced), THREE),
    "a gate and what it multiplies": (cut_of(32, gated), ("rows", 16, 16)),
    "a gate in every other row": (cut_of(32, gated_alternating), ("interleaved", 2, 0)),
    "glu": (cut_of(32, gated_by_glu), ("rows", 16, 16)),
    "cut behind an activation and dropout": (cut_of(32, activated_first), ("rows", 16, 16)),
    "the weight itself": (cut_of(48, cut_before), THREE),
    "slices of the weight": (cut_of(48, cut_before_by_slices), THREE),
    "the weight, and then its output": (cut_of(48, cut_before_and_behind), THREE),
    "a convolution": (
        cut_of(32, convolved, conv=nn.Conv1d(16, 48, 3, padding=1)),
        ("rows", 16, 16),
    ),
    "cut again behind a depthwise convolution": (
        cut_of(40, through_depthwise, conv=nn.Conv1d(24, 24, 2, padding=1, groups=24)),
        ("rows", 16, 16, 4, 4),
    ),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_fused_weight_is_split_as_its_output_is_cut(kind: str) -> None:
    model, spec = CUTS[kind]
    placed = roles(model, IDS)
    assert placed[FUSED] == placed[FUSED.replace("1", "0")] == spec
    assert placed["blocks.1.proj.weight"] == "whole"
    assert placed["out.weight"] == HEAD
    assert placed.get("blocks.1.conv.weight", ADAMW) in (ADAMW, ("flatten", THREE))
    parts = len(split(torch.arange(model.get_parameter(FUSED).numel()).view(-1, 16), spec))
    assert f"a forward cuts its output into {parts} parts" in reason_by_example(model, IDS, FUSED)


def rotated(rotary: Callable[[Tensor], Tensor]) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k = rotary(by_heads(self.fused(x))), rotary(by_heads(self.k(x)))
        return self.proj(attention(q, k, by_heads(self.v(x))).transpose(1, 2).flatten(-2))

    layers = {name: nn.Linear(16, 16) for name in ("fused", "k", "v", "proj")}
    return tokens(forward, **layers)


def values_in_halves(self: Any, x: Tensor) -> Tensor:
    """One query reads two halves of the value heads, side by side: a head's values are both halves (DiffLlama)."""
    q, k = by_heads(self.q(x)), by_heads(self.k(x))
    mixed = [attention(q, k, half.repeat(1, 2, 1, 1)) for half in by_heads(self.fused(x)).chunk(2, dim=1)]
    return self.proj(torch.cat(mixed, -1)[:, ::2].transpose(1, 2).flatten(-2))


def head_after_head(self: Any, x: Tensor) -> Tensor:
    parts = zip(self.q(x).chunk(4, -1), self.k(x).chunk(4, -1), self.fused(x).chunk(4, -1), strict=True)
    return self.proj(torch.cat([attention(k, v, q) for q, k, v in parts], -1))


def class_token(self: Any, x: Tensor) -> Tensor:
    read = self.fused(x)
    return torch.cat((read[:, :1], self.proj(read[:, 1:])), 1)


JOINED: dict[str, nn.Module] = {
    "rotary halves": rotated(rotary_cat),
    "rotary pairs": rotated(lambda x: x * 2 + rotary_pairs(x)),
    "rotary pairs, without the whole": rotated(rotary_pairs),
    "rotary pairs by unbind": rotated(rotary_unbound),
    "rotary numbers": rotated(rotary_complex),
    "tokens that are cut": cut_of(16, class_token),
    "values in halves": cut_of(16, values_in_halves, q=nn.Linear(16, 16), k=nn.Linear(16, 16)),
    "a loop over heads": cut_of(16, head_after_head, q=nn.Linear(16, 16), k=nn.Linear(16, 16)),
}


# --- what a forward shows of all matrices of a model -----------------------------------------------------------------

# A model, its example, and roles by patterns of names; matrices without one are "whole".
SHOWN: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {}
ENDS = {"embed.weight": INPUT, "out.weight": HEAD}


def ends() -> dict[str, Any]:
    return {"embed": nn.Embedding(9, 16), "out": nn.Linear(16, 9)}


def square_layers(names: Iterable[str]) -> dict[str, Any]:
    return {name: nn.Linear(16, 16) for name in names}


def lists_of_square_layers(names: Iterable[str]) -> dict[str, Any]:
    return {name: nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for name in names}


def shows(expected: dict[str, Any], *example: Any, **layers: Any) -> Callable[..., Any]:
    """Make a case of a forward of these layers; without an example it reads tokens, and has their embedding."""

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        model = Calls(forward, **layers) if example else Calls(forward, **(ends() | layers))
        SHOWN[forward.__name__] = (model, example or IDS, expected if example else ENDS | expected)
        return forward

    return decorate


def shows_in_blocks(expected: dict[str, Any], **layers: Any) -> Callable[..., Any]:
    """Make a case of the forward of a block."""

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        SHOWN[forward.__name__] = (tokens(forward, **layers), IDS, ENDS | expected)
        return forward

    return decorate


@shows({"fused.weight": THREE}, fused=nn.Linear(16, 48), proj=nn.Linear(16, 16))
def features_that_are_copied_into_a_state_are_cut_all_the_same(self: Any, ids: Tensor) -> Any:
    """As the convolution states of linear attention, which are written where they lie and returned as a cache."""
    x = self.embed(ids)
    qkv, state = self.fused(x), torch.zeros(len(ids), 3, 48, device=ids.device)
    state.copy_(qkv[:, -3:])
    return self.out(x + self.proj(attention(*qkv.chunk(3, -1)))), state


@shows({}, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), out=nn.Linear(8, 9))
def a_residual_stream_that_is_cut_says_nothing_of_the_weights_that_write_it(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids)
    for layer in self.layers:
        x = x + layer(F.silu(x))
    a, b = x.chunk(2, -1)
    return self.out(a * b)


@shows({}, embed=nn.Embedding(9, 16), layer=nn.Linear(16, 16), out=nn.Linear(8, 3))
def nor_does_a_sum_of_a_layer_and_of_what_it_reads(self: Any, ids: Tensor) -> Tensor:
    stream = self.embed(ids)
    a, b = (stream + self.layer(F.silu(stream))).chunk(2, -1)
    return self.out(a * b)


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.qkv, self.proj, self.fc = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(16, 96))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, f = self.modulation(c).chunk(6, dim=1)
        y = self.norm(x) * (1 + b.unsqueeze(1)) + a.unsqueeze(1)
        x = x + g.unsqueeze(1) * self.proj(attention(*self.qkv(y).chunk(3, -1)))
        y = self.norm(x) * (1 + e.unsqueeze(1)) + d.unsqueeze(1)
        return x + f.unsqueeze(1) * self.fc(y)


@shows(
    {
        "*.modulation.1.weight": ("rows", *[16] * 6),
        "modulation.1.weight": ("rows", 16, 16),
        "*.qkv.weight": THREE,
        "linear.weight": HEAD,
        "patches.weight": INPUT,
        "labels.weight": INPUT,
    },
    *(torch.randn(2, 4, 8, 8), torch.tensor([1, 2])),
    **{"patches": nn.Conv2d(4, 16, 2, 2), "labels": nn.Embedding(5, 16), "linear": nn.Linear(16, 8)},
    blocks=nn.ModuleList([Modulated(), Modulated()]),
    modulation=nn.Sequential(nn.SiLU(), nn.Linear(16, 32)),
)
def a_diffusion_transformer(self: Any, image: Tensor, label: Tensor) -> Tensor:
    x, c = self.patches(image).flatten(2).mT, self.labels(label)
    for block in self.blocks:
        x = block(x, c)
    shift, scale = self.modulation(c).chunk(2, dim=1)
    return self.linear(x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))


@shows({"of_*.weight": ("rows", *[16] * 4)}, of_input=nn.Linear(16, 64), of_state=nn.Linear(16, 64, bias=False))
def the_gates_of_a_recurrent_cell_of_ones_own(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids)
    h = c = x.new_zeros(x.shape[0], 16)
    for t in range(x.shape[1]):
        i, f, g, o = (self.of_input(x[:, t]) + self.of_state(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return self.out(h)


@shows({}, **lists_of_square_layers("qkvo"))
def states_among_the_outputs_are_no_results(self: Any, ids: Tensor) -> dict[str, Any]:
    x = states = self.embed(ids)
    hidden_states = []
    for q, k, v, o in zip(self.q, self.k, self.v, self.o, strict=True):
        hidden_states.append((k(x), v(x)))
        x = x + o(attention(q(x), *hidden_states[-1]))
    return {"logits": self.out(x), "past": hidden_states, "encoder_states": states, "hidden": (x,)}


@shows({}, **square_layers(["state"]))
def a_state_among_the_outputs_is_no_result_though_its_layer_is_registered_last(self: Any, ids: Tensor) -> Any:
    state = self.state(F.relu(self.embed(ids)))
    return self.out(F.relu(state)), state


ADAPTIVE = nn.AdaptiveLogSoftmaxWithLoss(16, 9, [3, 6])


@shows(
    {"embed.weight": INPUT, "*.head.weight": HEAD, "*.tail.?.1.weight": HEAD, "*.tail.1.0.weight": VECTOR},
    *IDS,
    **{"embed": nn.Embedding(9, 16), "mix": nn.Linear(16, 16), "adaptive": ADAPTIVE},
)
def the_adaptive_softmax_of_torch(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids).flatten(0, 1)
    return self.adaptive(x + self.mix(x), ids.flatten()).loss


def convolutions(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)])


@shows(
    {
        "encoder.0.weight": INPUT,
        "decoder.2.weight": HEAD,
        "quantize.weight": ("flatten", ("rows", 4, 4)),
        "*": "flatten",
    },
    torch.randn(2, 3, 8, 8),
    **{"encoder": convolutions(3, 16, 16, 8), "decoder": convolutions(4, 16, 16, 3)},
    **{"quantize": nn.Conv2d(8, 8, 1), "unquantize": nn.Conv2d(4, 4, 1)},
)
def an_autoencoder_whose_decoder_is_not_registered_last(self: Any, image: Tensor) -> Any:
    mean, log = self.quantize(self.encoder(image)).chunk(2, 1)
    z = mean + torch.exp(0.5 * log) * torch.randn_like(mean)
    return self.decoder(self.unquantize(z)), mean, log


@shows(
    {"stem.weight": INPUT, "out.weight": HEAD},
    torch.randn(2, 5, 16),
    torch.randn(2, 7, 16),
    stem=nn.Linear(16, 16),
    **lists_of_square_layers("qkvo"),
    out=nn.Linear(16, 3),
)
def keys_of_a_text_that_each_block_reads_are_no_input_layers(self: Any, x: Tensor, text: Tensor) -> Tensor:
    x = self.stem(x)
    for q, k, v, o in zip(self.q, self.k, self.v, self.o, strict=True):
        x = x + o(attention(q(x), k(text), v(text)))
    return self.out(x)


@shows(
    {"student.weight": INPUT, "out.weight": HEAD},
    torch.randn(2, 16),
    teacher=nn.Linear(16, 16).requires_grad_(False),
    **square_layers(["student", "reads", "out"]),
)
def what_a_teacher_makes_without_gradients_is_no_input_layer_for_sure(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        states = self.teacher(x)
    return self.out(F.relu(self.student(x)) + self.reads(states))


@shows(
    {"student.weight": INPUT, "out.weight": HEAD},
    torch.randn(2, 16),
    scale=nn.Parameter(torch.ones(16)),
    **square_layers(["student", "reads", "out"]),
)
def a_layer_that_reads_fixed_numbers_is_no_input_layer_for_sure(self: Any, x: Tensor) -> Tensor:
    fixed = self.scale * torch.ones_like(self.scale)
    return self.out(F.relu(self.student(x)) + self.reads(fixed.expand(2, 16)))


@shows(
    ENDS | {"places.weight": INPUT},
    *(*IDS, torch.arange(40).view(2, 5, 4)),
    **ends(),
    **lists_of_square_layers(["q", "v", "proj"]),
    places=nn.Linear(4, 16),
)
def a_layer_that_reads_integer_boxes_once_for_all_blocks_is_an_input_layer(
    self: Any, ids: Tensor, boxes: Tensor
) -> Any:
    """As in Bros: sines of coordinates, which meet the queries of each block."""
    x, places = self.embed(ids), self.places(torch.sin(boxes * 0.1))
    for q, v, proj in zip(self.q, self.v, self.proj, strict=True):
        x = x + proj(torch.softmax(q(x) @ places.mT, -1) @ v(x))
    return self.out(x)


REFINED = {"spectrum": nn.Linear(16, 4), "first": nn.Linear(4, 16), "last": nn.Linear(16, 4)}


@shows({"embed.weight": INPUT, "last.weight": HEAD}, *IDS, embed=nn.Embedding(9, 16), mid=nn.Linear(16, 16), **REFINED)
def a_layer_that_refines_what_a_deep_layer_made_makes_an_output(self: Any, ids: Tensor) -> Tensor:
    """As the postnet of SpeechT5 and Tacotron."""
    spectrum = self.spectrum(F.relu(self.mid(self.embed(ids))))
    return spectrum + self.last(torch.tanh(self.first(spectrum)))


@shows({"embed.weight": INPUT}, *IDS, embed=nn.Embedding(9, 16), **square_layers(["up", "down"]))
def a_residual_stream_which_begins_at_an_input_layer_is_no_output(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids)
    return x + self.down(F.relu(self.up(x)))


@shows({"words.weight": INPUT, "out.weight": HEAD}, *IDS, words=nn.Linear(9, 16), **square_layers(["mid", "out"]))
def a_layer_that_reads_tokens_by_one_hot_is_an_input_layer(self: Any, ids: Tensor) -> Tensor:
    return self.out(F.relu(self.mid(F.relu(self.words(F.one_hot(ids, 9).float())))))


WHERE = nn.Parameter(torch.randn(5, 16))


@shows(
    {"[wf]*": INPUT, "out.weight": HEAD}, torch.randn(2, 5, 16), where=WHERE, **square_layers(["first", "mid", "out"])
)
def positions_that_are_added_to_inputs_leave_the_next_layer_an_input_layer(self: Any, x: Tensor) -> Tensor:
    return self.out(F.relu(self.mid(F.relu(self.first(x + self.where)))))


@shows({"asks": INPUT}, asks=nn.Parameter(torch.randn(1, 4, 16)), **square_layers("qkv"))
def learned_queries_are_a_table_and_the_layer_that_reads_them_is_hidden(self: Any, ids: Tensor) -> Tensor:
    """As the attention pooling of timm and of Perceivers without a norm before it."""
    x, asks = self.embed(ids), self.asks.expand(len(ids), -1, -1)
    return self.out(attention(self.q(asks), self.k(x), self.v(x)))


@shows(
    {"first.weight": INPUT, "out.weight": HEAD},
    torch.randn(4, 16),
    torch.tensor([1, 2, 3, 0]),
    **square_layers(["first", "out"]),
)
def a_layer_that_reads_rows_of_inputs_by_index_is_an_input_layer(self: Any, x: Tensor, neighbours: Tensor) -> Tensor:
    """As graph networks do, which gather what their neighbours have."""
    return self.out(F.relu(self.first(x + x[neighbours])))


@shows({"out.weight": HEAD}, torch.randn(2, 16), **square_layers(["a", "b", "out"]))
def a_layer_behind_what_the_graph_hides_is_no_input_layer_for_sure(self: Any, x: Tensor) -> Tensor:
    return self.out(F.relu(self.b(checkpoint(self.a, x, use_reentrant=True))))


def checkpointed(self: Any, ids: Tensor, reentrant: bool = True) -> Tensor:
    x = self.embed(ids)
    for block in self.blocks:
        x = x + checkpoint(block, x, use_reentrant=reentrant)
    return self.out(x)


for reentrant in (False, True):
    blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(16, 16)) for _ in range(2))
    forward = functools.partial(checkpointed, reentrant=reentrant)
    SHOWN[f"checkpointed blocks, reentrant: {reentrant}"] = Calls(forward, **ends(), blocks=blocks), IDS, ENDS


def masked(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
    x = torch.relu(self.into(ids))
    q, k, v = self.q(x), self.k(x), self.v(x)
    return self.out(torch.softmax(q @ k.mT + mask.to(x.dtype) * -1e9, -1) @ v)


for dtype in (torch.int64, torch.uint8, torch.float32):
    model = Calls(masked, **square_layers(["into", *"qkv", "out"]))
    example = torch.randn(2, 5, 16), torch.ones(2, 5, 5, dtype=dtype)
    expected = {"into.weight": INPUT, "out.weight": HEAD}
    SHOWN[f"a mask of {dtype} that is added to scores leaves the input layer"] = model, example, expected


@shows(
    {"into.weight": INPUT, "out.weight": HEAD},
    *(torch.randn(2, 5, 16), torch.randn(2, 7, 16)),
    **{
        "mix": nn.ModuleList(nn.Linear(7, 7) for _ in range(3)),
        "kv": nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
    },
    **square_layers(["into", "q", "o", "out"]),
)
def a_layer_between_both_reads_of_a_text_makes_no_input_layer(self: Any, x: Tensor, text: Tensor) -> Tensor:
    """Talking heads: queries meet keys, a layer mixes the scores, and these meet values, in one block."""
    x = self.into(x)
    for kv, mix in zip(self.kv, self.mix, strict=True):
        x = x + self.o(torch.softmax(mix(self.q(x) @ kv(text).mT), -1) @ kv(text))
    return self.out(x)


@shows_in_blocks({"*.pairs": ADAMW}, pairs=nn.Parameter(torch.randn(9, 9, 2)), proj=nn.Linear(16, 16))
def numbers_that_are_read_as_complex_are_adamws(self: Any, x: Tensor) -> Tensor:
    """Real parameters of a Fourier layer, two for each complex number."""
    mixed = torch.einsum("bti,io->bto", torch.fft.rfft(x, dim=-1), torch.view_as_complex(self.pairs))
    return self.proj(torch.fft.irfft(mixed, n=16))


@shows_in_blocks(
    {"*.up": ("stack", ("rows", 24, 24)), "*.down": "stack"},
    up=nn.Parameter(torch.randn(2, 48, 16)),
    down=nn.Parameter(torch.randn(2, 16, 24)),
)
def experts_one_after_the_other_whose_tokens_are_joined_before_the_cut(self: Any, x: Tensor) -> Tensor:
    of_experts = zip(x.flatten(0, 1).split([4, 6]), self.up, strict=True)
    gate, up = torch.cat([F.linear(tokens, weight) for tokens, weight in of_experts]).chunk(2, -1)
    of_experts = zip((F.silu(gate) * up).split([4, 6]), self.down, strict=True)
    return torch.cat([F.linear(tokens, weight) for tokens, weight in of_experts]).view(x.shape)


BARE: dict[str, tuple[tuple[int, ...], Any]] = {  # names say nothing
    "words": ((9, 16), INPUT),
    "w_in": ((16, 64), ("transposed", ("rows", 32, 32))),
    "w_out": ((16, 32), "whole"),
    "per_expert": ((4, 16, 32), ("stack", ("transposed", ("interleaved", 2, 0)))),
    "per_expert_out": ((4, 16, 16), "stack"),
    "filters": ((16, 1, 3), ADAMW),
    "kernel": ((16, 16, 3), "flatten"),
    "final": ((16, 9), HEAD),
    "shift": ((5, 16), INPUT),
    "first": ((3, 16), INPUT),
}


@shows(
    {name: role for name, (_, role) in BARE.items()},
    *IDS,
    **{name: nn.Parameter(torch.randn(shape)) for name, (shape, _) in BARE.items()},
)
def bare_parameters_are_what_a_forward_does_with_them(self: Any, ids: Tensor) -> Tensor:
    x = torch.cat([self.first.expand(len(ids), -1, -1), self.words[ids] + self.shift], 1)[:, 3:]
    gate, up = (x @ self.w_in).chunk(2, -1)
    x = x + (gate.sigmoid() * up) @ self.w_out.T
    y = torch.einsum("btd,edf->betf", x, self.per_expert)
    a, b = y[..., ::2], y[..., 1::2]
    x = x + torch.einsum("betf,egf->betg", a * b, self.per_expert_out).sum(1)
    x = x + F.conv1d(x.mT, self.filters, padding=1, groups=16).mT
    x = x + F.conv1d(x.mT, self.kernel, padding=1).mT
    return x @ self.final


def recurrent(self: Any, ids: Tensor) -> Tensor:
    """The layer may be one node that hides its gates, or steps that read a state of zeros."""
    return self.out(self.rnn(self.embed(ids))[0])


for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
    model = Calls(recurrent, **ends(), rnn=kind(16, 16, batch_first=True))
    cut = ("rows", *[16] * gates) if gates > 1 else "whole"
    SHOWN[f"{kind.__name__} is split by its class"] = model, IDS, ENDS | {"rnn.*": cut}


def attention_of_torch(self: Any, x: Tensor, of_others: bool = False) -> Tensor:
    bias, y = torch.zeros(48), x + 1 if of_others else x
    mixed, _ = F.multi_head_attention_forward(
        x, y, y, 16, 4, self.fused.weight, bias, None, None, False, 0.0, self.proj.weight, self.proj.bias
    )
    return mixed


for of_others in (False, True):
    model = cut_of(48, functools.partial(attention_of_torch, of_others=of_others))
    SHOWN[f"attention by torch's function, of others: {of_others}"] = model, IDS, ENDS | {"*.fused.weight": THREE}


def policy_and_value(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = self.body(x)
    return self.one(h), self.other(h)


BODY = {"body": nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())}
TWO_HEADS: dict[str, tuple[int, nn.Module]] = {
    "policy and value": (4, nn.Linear(32, 1)),
    "mean and log_std": (3, nn.Linear(32, 3)),
    "classes and boxes": (92, nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))),
}
for name, (out, other) in TWO_HEADS.items():
    model = Calls(policy_and_value, **BODY, one=nn.Linear(32, out), other=other)
    last = "other.2.weight" if isinstance(other, nn.Sequential) else "other.weight"
    SHOWN[name] = model, (torch.randn(5, 8),), {"body.0.weight": INPUT, "one.weight": HEAD, last: HEAD}


class Parallel(nn.Module):
    """A block whose attention and MLP read the same stream and are added to it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.o(F.softmax(self.q(y), -1)) + self.down(F.gelu(self.up(y)))


STREAM = (torch.randn(2, 5, 16),)
for count in (1, 2):
    # Its blocks read inputs and make outputs, but both are the stream to which they add.
    SHOWN[f"a stage of {count} between others"] = (
        nn.Sequential(*(Parallel() for _ in range(count)), nn.LayerNorm(16)),
        STREAM,
        {},
    )
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)
SHOWN["blocks without ends stay blocks"] = ENCODER, STREAM, {"*.in_proj_weight": THREE}
FROZEN = nn.Sequential(
    nn.Linear(16, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
)
SHOWN["frozen layers are no inputs"] = FROZEN, STREAM, {"4.weight": HEAD}
SHOWN |= {kind: (model, IDS, ENDS) for kind, model in JOINED.items()}


@pytest.mark.parametrize("kind", SHOWN)
def test_roles_that_a_forward_shows(kind: str) -> None:
    model, example, expected = SHOWN[kind]
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    placed = roles(model, example)
    assert all(fnmatch.filter(placed, pattern) for pattern in expected), "each pattern names a matrix"
    patterns = {name: [pattern for pattern in expected if fnmatch.fnmatchcase(name, pattern)] for name in placed}
    assert placed == {name: expected[matching[0]] if matching else "whole" for name, matching in patterns.items()}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained


# --- ends ------------------------------------------------------------------------------------------------------------


def test_heads_of_a_loss() -> None:
    model = Calls(policy_and_value, **BODY, one=nn.Linear(32, 10), other=nn.Linear(32, 10))
    x, y = torch.randn(5, 8), torch.arange(5)

    def loss() -> Tensor:
        first, other = model(x)
        return F.cross_entropy(first, y) + 0.3 * F.cross_entropy(other, y) + 1e-3 * first.logsumexp(-1).square().mean()

    placed = roles(model, loss)
    assert placed["one.weight"] == placed["other.weight"] == HEAD
    assert placed["body.0.weight"] == INPUT


@pytest.mark.parametrize("steps", [[1.0, 2.0], [1, 2]])
@pytest.mark.parametrize("function", [False, True])
def test_a_layer_that_reads_sines_of_a_time_step_is_an_input_layer(steps: list[Any], function: bool) -> None:
    """Integers have no gradient, but what becomes floating point of them has."""

    def forward(self: Any, x: Tensor, step: Tensor) -> Tensor:
        step = step + 1
        waves = torch.sin(step[:, None].float() * torch.linspace(0.1, 1, 8, device=step.device))
        return self.out(F.relu(self.stem(x) + self.time(waves)))

    model = Calls(forward, stem=nn.Linear(8, 16), time=nn.Linear(8, 16), out=nn.Linear(16, 3))
    example: Any = (torch.randn(2, 8), torch.tensor(steps))
    placed = roles(model, (lambda: model(*example).sum()) if function else example)
    assert placed == {"stem.weight": INPUT, "time.weight": INPUT, "out.weight": HEAD}


def test_stages_of_a_pipeline_take_the_ends_of_the_whole_model() -> None:
    """Alone, the first layer of the last stage reads inputs, and the last of the first makes outputs."""
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    whole = nn.Sequential(*layers)
    groups = mm.split_params(whole, example=(torch.randn(2, 8),))
    for stage, muon_weights in ((whole[:3], ["2.weight"]), (whole[3:], ["4.weight"])):
        named = nn.Module()
        for name, module in zip(range(3) if muon_weights == ["2.weight"] else range(3, 7), stage, strict=True):
            named.add_module(str(name), module)
        assert groups.held_by(named)[0]["param_names"] == muon_weights


def test_several_losses_and_what_is_used_in_another_phase() -> None:
    """A critic and a generator have their losses; what no loss of this phase uses is judged as without an example."""

    def forward(self: Any, x: Tensor) -> Any:
        fake = self.make(F.relu(self.read(x)))
        if self.training:
            return {"a": self.judge(F.relu(self.see(fake))).mean(), "b": (fake - x).square().mean()}
        return fake

    sizes = {"read": (8, 16), "make": (16, 8), "see": (8, 16), "judge": (16, 4)}
    model = Calls(forward, **{name: nn.Linear(*size) for name, size in sizes.items()})
    x = torch.randn(2, 8)
    placed = roles(model, (x,))
    assert placed == {"read.weight": INPUT, "make.weight": "whole", "see.weight": "whole", "judge.weight": HEAD}
    model.eval()
    groups = mm.split_params(model, example=(x,))
    group_and_reason = {name: (g["name"], g["reasons"][i]) for g in groups for i, name in enumerate(g["param_names"])}
    assert group_and_reason["make.weight"][0] == HEAD
    assert group_and_reason["see.weight"][0] == "muon"
    assert "does not show it" in group_and_reason["see.weight"][1]


class Swish(torch.autograd.Function):
    """An activation with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.sigmoid()


def test_a_function_with_a_gradient_of_its_own_leaves_a_doubt_and_no_wrong_role() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = Swish.apply(self.qkv(x)).chunk(2, -1)
        return self.proj(gate * up)

    model = tokens(forward, qkv=nn.Linear(16, 32), proj=nn.Linear(16, 16))
    groups = mm.split_params(model, example=IDS)
    assert groups[0]["param_names"] == [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "proj")]
    assert {group["name"] for group in groups} == {"muon", INPUT, HEAD, VECTOR}
    assert groups.guesses == tuple(f"blocks.{i}.qkv.weight" for i in range(2))
    assert "hides whether it is fused; a guess" in str(groups)


class GPT2Attention(Calls):
    """Attention whose class tells that its weight holds q, k and v of 16 rows each."""

    __module__ = "transformers.models.gpt2.modeling_gpt2"
    split_size = 16


def by_indices(self: Any, x: Tensor) -> Tensor:
    """Only the first cut is one that a graph shows."""
    q, query_and_rest = self.c_attn(x).split([16, 32], dim=-1)
    return self.proj(attention(q, query_and_rest[..., list(range(16))], query_and_rest[..., list(range(16, 32))]))


def all_by_indices(self: Any, x: Tensor) -> Tensor:
    qkv = self.c_attn(x)
    return self.proj(attention(*(qkv[..., list(range(16 * i, 16 * i + 16))] for i in range(3))))


@pytest.mark.parametrize(
    ("forward", "cut"), [(by_indices, ("rows", 16, 32)), (all_by_indices, None)], ids=["some", "all"]
)
def test_parts_that_a_graph_hides_are_not_taken_from_a_known_class(forward: Any, cut: Any) -> None:
    """What is not cut and what is unknown are two answers."""
    layers = {"c_attn": nn.Linear(16, 48), "proj": nn.Linear(16, 16)}
    attends = GPT2Attention(forward, **layers)
    model = Calls(lambda self, x: self.out(self.a(self.embed(x))), embed=nn.Embedding(9, 16), a=attends)
    model.out = nn.Linear(16, 9)
    facts = facts_of_example(model, IDS)
    assert facts[id(layers["proj"].weight)].cut == "whole"
    assert not facts[id(layers["proj"].weight)].hidden
    assert facts[id(layers["c_attn"].weight)].cut == cut
    assert facts[id(layers["c_attn"].weight)].hidden
    assert roles(model, IDS)["a.c_attn.weight"] == THREE


def test_features_that_are_joined_with_others_and_then_cut_leave_a_doubt() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = torch.cat([self.q(x), self.fused(x)], -1).chunk(3, -1)
        return self.proj(attention(q, k, v))

    model = cut_of(32, forward, q=nn.Linear(16, 16))
    assert reason_by_example(model, IDS, FUSED).endswith("hides whether it is fused; a guess")


def test_a_weight_of_which_one_product_takes_some_rows_leaves_a_doubt() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.proj(self.fused(x)[..., :16] + x @ self.fused.weight[:16].T)

    assert (
        reason_by_example(cut_of(32, forward), IDS, FUSED)
        == "linear; a forward does not show whether it is fused; a guess"
    )


def test_indices_that_pick_tokens_hide_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.proj(self.fused(x)[:, [0, 1, 2, 3, 4]])

    model = cut_of(16, forward)
    facts = facts_of_example(model, IDS)[id(model.get_parameter(FUSED))]
    assert (facts.cut, facts.hidden) == ("whole", False)


def test_a_weight_that_a_function_of_its_own_multiplies_by_is_said_to_be_a_guess() -> None:
    model = Calls(lambda self, x: self.out(OpaqueProduct.apply(self.first(x), self.mid.weight)), first=nn.Linear(8, 16))
    model.mid, model.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 3)
    example = (torch.randn(2, 8),)
    assert roles(model, example)["mid.weight"] == "whole"
    assert "hides whether it is fused; a guess" in reason_by_example(model, example, "mid.weight")


def test_experts_whose_kernel_takes_bf16_alone_on_meta() -> None:
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 64}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    placed = roles(model, {"input_ids": torch.ones(1, 8, dtype=torch.int64)})
    assert placed["model.layers.0.mlp.experts.gate_up_proj"] == ("stack", ("rows", 48, 48))


def test_a_function_that_calls_compiled_blocks() -> None:
    """They run uncompiled: a compiled function is one node, which hides its products."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = cut_of(32, gqa_by_group)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    facts = facts_of_example(model, lambda: model(*IDS).sum())
    assert facts[id(model.get_parameter(FUSED))].cut == ("interleaved", (8, 4, 4), 0)
    assert compiled == []


# --- what makes a weight ---------------------------------------------------------------------------------------------


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed: nn.Module = nn.utils.weight_norm(layer)
    return normed


MADE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "old weight norm": old_weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("convolution", [False, True])
def test_a_parameter_that_makes_a_weight_is_adamws(kind: str, convolution: bool) -> None:
    if convolution:
        hidden: nn.Module = nn.Conv1d(16, 16, 3)
        layers = [nn.Conv1d(3, 16, 3), hidden, nn.ReLU(), nn.Conv1d(16, 5, 3)]
    else:
        hidden = nn.Linear(16, 16)
        layers = [nn.Linear(3, 16), hidden, nn.ReLU(), nn.Linear(16, 5)]
    MADE[kind](hidden)
    example = (torch.randn(2, 3, 12) if convolution else torch.randn(2, 3),)
    placed = roles(nn.Sequential(*layers), example)
    assert {role for name, role in placed.items() if name.startswith("1.")} <= {ADAMW, VECTOR}
    assert placed["0.weight"] == INPUT
    assert placed["3.weight"] == HEAD


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora_a", "lora_b")])
def test_a_low_rank_pair_beside_a_layer_is_adamws(names: tuple[str, str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        down, up = (getattr(self, name) for name in names)
        out: Tensor = self.base(x) + 2 * up(down(F.dropout(x, 0.1)))
        return F.relu(out)

    pair = {names[0]: nn.Linear(16, 4, bias=False), names[1]: nn.Linear(4, 16, bias=False)}
    placed = roles(tokens(forward, base=nn.Linear(16, 16).requires_grad_(False), **pair), IDS)
    assert {placed[f"blocks.{i}.{name}.weight"] for i in range(2) for name in names} == {ADAMW}


def test_a_tied_table_and_a_shared_layer() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + self.again(F.silu(x))
        return x @ self.embed.weight.T

    model = Calls(forward, embed=nn.Embedding(9, 16), again=nn.Linear(16, 16))
    assert roles(model, IDS) == {"embed.weight": INPUT, "again.weight": "whole"}
    assert facts_of_example(model, IDS)[id(model.get_parameter("again.weight"))].does == "multiplies"


def test_a_weight_that_takes_no_part_is_said_to() -> None:
    layers = {"idle": nn.Linear(4, 4), "a": nn.Linear(8, 16), "b": nn.Linear(16, 3)}
    model = Calls(lambda self, x: self.b(F.relu(self.a(x))), **layers)
    assert (
        reason_by_example(model, (torch.randn(2, 8),), "idle.weight")
        == "linear; the example's forward does not show it; a guess"
    )


# --- how the forward is run ------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("count", torch.zeros(()))
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.device.type)
        self.count += 1
        self.norm.eval()
        return self.b(F.dropout(self.norm(self.a(x))))


@pytest.mark.parametrize("function", [False, True])
def test_a_model_is_left_as_it_was(function: bool) -> None:
    model, x = Noisy(), torch.randn(4, 8)
    model.a.weight.grad = torch.ones_like(model.a.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffer, state = model.count, torch.random.get_rng_state()
    placed = roles(model, (lambda: model(x)) if function else (x,))
    assert placed == {"a.weight": INPUT, "b.weight": HEAD}
    assert model.calls == (["cpu"] if function else [])  # a copy on meta has run
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.count is buffer
    assert model.norm.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model.a.weight.grad, torch.ones_like(model.a.weight))
    assert model.b.weight.grad is None
    assert not model._forward_pre_hooks
    assert not x.requires_grad


def test_a_forward_that_reads_numbers_runs_on_the_model() -> None:
    model = Noisy()
    ran = Calls(lambda self, x: self.inner(x if x.sum() > 0 else -x), inner=model)
    assert roles(ran, {"x": torch.randn(4, 8)}) == {"inner.a.weight": INPUT, "inner.b.weight": HEAD}
    assert model.calls == ["cpu"]
    assert model.count == 0


def standardized(weight: Tensor) -> Tensor:
    """Rows of mean 0 and variance 1, as timm's ScaledStdConv2d computes them."""
    return F.batch_norm(weight.view(1, len(weight), -1), None, None, training=True, momentum=0.0).view_as(weight)


@pytest.mark.parametrize("kind", ["weight_norm", "parametrized", "spectral_norm", "standardized"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_layer_beside_one_whose_weight_is_computed_is_hidden(kind: str, number: int) -> None:
    """It had been taken for an input layer, and AdamW trained it, as nothing before it multiplied by a parameter."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    computed = layers[number]
    if kind == "standardized":
        computed.forward = lambda x: F.linear(x, standardized(computed.weight), computed.bias)  # type: ignore[method-assign]
    elif kind == "weight_norm":
        torch.nn.utils.weight_norm(computed)
    elif kind == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(computed)
    else:
        torch.nn.utils.parametrizations.spectral_norm(computed)
    placed = roles(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]), (torch.randn(4, 8),))
    assert placed["2.weight"] == "whole"
    assert placed["4.weight" if number == 0 else "0.weight"] == (HEAD if number == 0 else INPUT)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    assert roles(model, (torch.randn(2, 8),)) == {"0.weight": INPUT, "2.weight": HEAD}


def test_a_model_on_meta_may_have_run_and_hold_what_it_computed() -> None:
    """Torch copies no tensor with a graph."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.hidden = {"last": [self.inner[0](x)]}
        return self.inner(x)

    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        model = Calls(forward, inner=inner)
        model(torch.randn(2, 8))
    assert roles(model, (torch.randn(2, 8),)) == {"inner.0.weight": INPUT, "inner.2.weight": HEAD}


def test_a_model_on_meta_that_reads_numbers_is_told_yes() -> None:
    """There are none, and no other forward could have them."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    asks = Calls(lambda self, x, mask: self.inner(x if mask.all() else x[: mask.sum().item()]), inner=model)
    example = (torch.randn(2, 8), torch.ones(2, dtype=torch.bool))
    assert roles(asks, example) == {"inner.0.weight": INPUT, "inner.2.weight": HEAD}
    asks.inner[1].register_parameter("more", nn.Parameter(torch.randn(1)))
    assert roles(asks, example) == {"inner.0.weight": INPUT, "inner.2.weight": HEAD}


def test_a_list_with_gaps_and_complex_weights() -> None:
    """Gaps are what torch allows; AdamW steps both parts of a complex number, and the optimizer can be made."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for norm, layer, after in self.layers:
            x = layer(norm(x))
            assert after is None
        spectrum = torch.einsum("bi,io->bo", torch.fft.rfft(F.relu(x))[:, :8], self.weights)
        return self.out(torch.fft.irfft(spectrum, n=16))

    layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(n), nn.Linear(n, 16), None]) for n in (8, 16))  # type: ignore[list-item]
    weights = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
    model = Calls(forward, layers=layers, weights=weights, out=nn.Linear(16, 3))
    example = (torch.randn(2, 8),)
    placed = roles(model, example)
    assert placed == {"layers.0.1.weight": INPUT, "layers.1.1.weight": "whole", "weights": ADAMW, "out.weight": HEAD}
    optimizer = mm.from_model(model, example=example)
    before = weights.detach().clone()
    model(*example).square().mean().backward()
    optimizer.step()
    assert not torch.equal(weights, before)


def test_wrappers_are_looked_into() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    assert roles(torch.compile(model), (torch.randn(2, 8),)) == {"0.weight": INPUT, "2.weight": HEAD}


def by_head_size(self: Any, x: Tensor) -> Tensor:
    """Reads the number of heads off the weight's output, which is a shard of it under tensor parallelism."""
    q, k, v = self.fused(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return self.proj(attention(q, k, v).transpose(1, 2).flatten(-2))


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    plan["out"] = ColwiseParallel(output_layouts=Replicate())
    for i in range(2):
        plan |= {f"blocks.{i}.fused": ColwiseParallel(), f"blocks.{i}.proj": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor"], plan)


def both_ways(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return sharded(tensor_parallel(model, mesh), mesh)


def replicas_of_shards(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, tuple[Callable[[nn.Module, DeviceMesh], nn.Module], tuple[int, int], Any]] = {
    "replicated": (replicated, (2, 1), THREE),
    "sharded": (sharded, (2, 1), THREE),
    "replicas of shards": (replicas_of_shards, (1, 2), THREE),
    # Each rank cuts its own rows into three: eight rows of q, eight of k and eight of v, then those of the next rank.
    "tensor parallel": (tensor_parallel, (1, 2), ("interleaved", 3, 0, 8)),
    "both": (both_ways, (1, 2), ("interleaved", 3, 0, 8)),
}


def _roles_of_ranks(kind: str) -> tuple[Any, list[str], list[str], bool]:
    """The roles of a model before it is distributed, what the first step says of them then, and errors of examples."""
    distribute, sizes, _ = WAYS[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    model = cut_of(48, by_head_size)
    groups, placed = mm.split_params(model, example=IDS), roles(model, IDS)
    model = distribute(model, mesh)
    errors = []
    for example in (IDS, lambda: model(*IDS).sum()):
        try:
            assert roles(model, example) == placed
        except ValueError as error:
            errors.append(str(error))
    holders = groups.held_by(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = mm.Muon(holders, process_group="world" if kind == "replicated" else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(*IDS).square().mean().backward()
        optimizer.step()
    moved = not any(torch.equal(before[name], p) for name, p in model.named_parameters() if p.dim() > 1)
    return placed, [text for warning in caught if "forward" in (text := str(warning.message))], errors, moved


@pytest.mark.parametrize("kind", WAYS)
def test_a_distributed_model_has_the_roles_that_it_had_before(kind: str, workers: Callable[[int], Pool]) -> None:
    expected = {"embed.weight": INPUT, "out.weight": HEAD}
    for i in range(2):
        expected |= {f"blocks.{i}.fused.weight": THREE, f"blocks.{i}.proj.weight": "whole"}
    for rank, (placed, texts, errors, moved) in enumerate(workers(2).run(_roles_of_ranks, kind)):
        assert placed == expected
        assert moved
        if kind == "replicated":
            assert errors == []
        else:
            assert len(errors) == 2
            assert all("found example= for a model that is sharded: this process has a part of" in e for e in errors)
            assert all("groups.held_by(model)" in e for e in errors)
        if WAYS[kind][2] == THREE:
            assert texts == []
        elif rank == 0:  # each rank cuts its own rows, as only the distributed model shows
            assert len(texts) == 1
            assert '"matrices": ("interleaved", 3, 0, 8)' in texts[0]
        else:  # which has seen the same
            assert texts == []


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        ("text", TypeError, "example= of type str"),
        ((torch.randn(2, 7),), ValueError, "model's forward raises RuntimeError: (addmm: )?mat1 and mat2 shapes"),
        ({"y": torch.randn(2, 8)}, ValueError, "forward raises TypeError"),
        (lambda: torch.zeros(()), ValueError, "no tensor that depends on a weight"),
    ],
)
def test_wrong_examples(example: Any, error: type[Exception], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises(error, match=message):
        mm.split_params(model, example=example)
    assert not model._forward_pre_hooks


def test_from_model_takes_an_example_and_explains_it() -> None:
    model = Calls(policy_and_value, **BODY, one=nn.Linear(32, 4), other=nn.Linear(32, 1))
    optimizer = mm.from_model(model, example=(torch.randn(5, 8),))
    assert "in a forward, no other layer reads what it makes" in str(optimizer.explain())
    assert "in a forward, it reads the model's inputs" in str(optimizer.explain())


def grows(model: Any, x: Tensor) -> Tensor:
    model.cache.data = torch.cat([model.cache, x.detach()])
    return model.b(model.a(x).relu())


def with_buffer(buffer: Tensor, forward: Any) -> nn.Module:
    model = Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.register_buffer("cache", buffer)
    model.a.weight.requires_grad_(False)
    model.b.weight.grad = torch.ones(8, 8)
    return model


def inference_buffer() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 8)


@pytest.mark.parametrize(
    ("buffer", "forward"),
    [
        (lambda: torch.zeros(0, 8), grows),
        (lambda: torch.ones(1).expand(8), lambda model, x: model.b(model.a(x).relu() * model.cache)),
        (inference_buffer, lambda model, x: model.b(model.a(x).relu())),
    ],
    ids=["grows", "expanded", "inference"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_it_was_whatever_its_buffers_are(
    buffer: Callable[[], Tensor], forward: Callable[..., Any], fails: bool
) -> None:
    model = with_buffer(buffer(), forward)
    before, gradient = model.cache.clone(), model.b.weight.grad

    def loss() -> Tensor:
        total: Tensor = model(torch.randn(2, 8)).sum()
        total.backward()
        model.zero_grad()
        if fails:
            raise ArithmeticError("none of yours")
        total = model(torch.randn(2, 8)).sum()
        total.backward(retain_graph=True)
        return total

    if fails:
        with pytest.raises(ValueError, match="forward raises ArithmeticError: none of yours"):
            mm.split_params(model, example=loss)
    else:
        mm.split_params(model, example=loss)
    assert torch.equal(model.cache, before)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert model.a.weight.grad is None
    assert model.b.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(8, 8))


def test_an_example_and_outputs_may_be_anything() -> None:
    """Numbers that a forward writes in place, on the model itself; outputs that refer to themselves."""

    def forward(model: Any, numbers: Tensor, x: Tensor) -> Any:
        numbers.add_(1)
        outputs: dict[str, Any] = {"loss": model.b(model.a(x) * float(numbers.sum().item()))}
        outputs["self"] = outputs
        return outputs

    model, numbers = Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 3)), torch.zeros(3, dtype=torch.int64)
    mm.split_params(model, example=(numbers, torch.randn(2, 8)))
    assert not numbers.any()


def test_a_lazy_model_is_told_so_with_an_example_too() -> None:
    with pytest.raises(ValueError, match="a parameter of the lazy module LazyLinear"):
        mm.split_params(nn.Sequential(nn.LazyLinear(4)), example=(torch.randn(2, 8),))


# ------------------------------------------------------------------ what a restructure had lost


def joined_before_a_kernel(self: Any, x: Tensor) -> Tensor:
    q, k, v = OpaqueProduct.apply(x, torch.cat([self.q.weight, self.k.weight, self.v.weight])).chunk(3, -1)
    return attention(q, k, v)


def quantized_before_a_kernel(self: Any, x: Tensor) -> Tensor:
    weight = self.q.weight
    return OpaqueProduct.apply(x, weight + (torch.round(weight * 8) / 8 - weight).detach())


@pytest.mark.parametrize("forward", [joined_before_a_kernel, quantized_before_a_kernel])
def test_weights_of_layers_that_a_kernel_reads_are_no_tables(forward: Callable[..., Any]) -> None:
    layers = {name: nn.Linear(16, 16, bias=False) for name in "qkv"}
    groups = mm.split_params(tokens(forward, **layers), example=IDS)
    names = [name for group in groups if group["algorithm"] == "muon" for name in group["param_names"]]
    used = "qkv" if forward is joined_before_a_kernel else "q"
    assert {f"blocks.0.{name}.weight" for name in used} <= set(names)


def test_channels_of_a_model_make_no_input_of_a_convolution() -> None:
    """Models of images have channels too, such as those of diffusers, and are no convolutions."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 3, 3))
    model.in_channels = model.out_channels = 3  # type: ignore[assignment]
    groups = mm.split_params(model)
    assert "0.weight" in next(group for group in groups if group["name"] == INPUT)["param_names"]
