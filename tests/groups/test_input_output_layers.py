"""Where a model meets its data, and what is cut into several matrices: as autograd's graph of a forward shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from muonmesh.groups import ParamGroups, split_params
from tests.support.dataflow import Flow, flow
from tests.support.zoo import numbers_on_meta

COVERS = ("groups.known.input_output_layers",)


def small(name: str, **settings: Any) -> nn.Module:
    kind = getattr(transformers, name)
    config = kind.config_class(**settings)
    with torch.device("meta"):
        built: nn.Module = kind(config)
    return built.eval()


def placed(groups: ParamGroups) -> dict[str, tuple[str, Any]]:
    return {
        name: (group["name"].partition("[")[0], group["matrices"][i] if "matrices" in group else None)
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


IMAGE = {"pixel_values": (1, 3, 64, 64)}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
VISION |= {"image_size": 64, "patch_size": 16}
TOWERS = {
    "vision_config": {**VISION, "patch_size": 32},
    "text_config": {**VISION, "hidden_size": 24},
    "projection_dim": 24,
}
# The model, its settings, the shapes of what it reads, and the outputs that are its results.
MODELS: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]], tuple[str, ...]]] = [
    ("YolosForObjectDetection", {**VISION, "image_size": [64, 64]}, IMAGE, ("logits", "pred_boxes")),
    ("OwlViTForObjectDetection", TOWERS, {"input_ids": (2, 8), **IMAGE}, ("pred_boxes",)),
    (
        "ViTMAEForPreTraining",
        {**VISION, "decoder_hidden_size": 24, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        IMAGE,
        ("logits",),
    ),
    (
        "PatchTSTForPretraining",
        {"d_model": 32, "num_hidden_layers": 1, "num_input_channels": 2, "ffn_dim": 48},
        {"past_values": (2, 32, 2)},
        ("prediction_output",),
    ),
    (
        "Speech2TextForConditionalGeneration",
        {"encoder_layers": 1, "decoder_layers": 1, "d_model": 48, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        {"input_features": (1, 40, 80), "decoder_input_ids": (1, 4)},
        ("logits",),
    ),
    (
        "WhisperForConditionalGeneration",
        {"encoder_layers": 1, "decoder_layers": 1, "d_model": 48, "max_source_positions": 20},
        {"input_features": (1, 80, 40), "decoder_input_ids": (1, 4)},
        ("logits",),
    ),
    (
        "ResNetForImageClassification",
        {"num_labels": 3, "embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"},
        IMAGE,
        ("logits",),
    ),
    ("ViTForImageClassification", VISION, IMAGE, ("logits",)),
    (
        "DecisionTransformerModel",
        {"hidden_size": 32, "n_layer": 1, "n_head": 2},
        {"states": (1, 4, 17), "actions": (1, 4, 4), "returns_to_go": (1, 4, 1), "timesteps": (1, 4)},
        ("state_preds", "action_preds", "return_preds"),
    ),
]


def inputs(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return {
            name: torch.ones(shape, dtype=torch.long if name.endswith(("ids", "timesteps")) else torch.float32)
            for name, shape in shapes.items()
        }


def ran(model: nn.Module, shapes: dict[str, tuple[int, ...]], results: tuple[str, ...]) -> Flow:
    with torch.device("meta"), numbers_on_meta():
        outputs = model(**inputs(shapes))
    return flow(model, [outputs[name] for name in results])


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case[0])
def test_first_and_last_layers_are_adamws_and_no_others(case: tuple[Any, ...]) -> None:
    name, settings, shapes, results = case
    model = small(name, **settings)
    with numbers_on_meta():
        groups_of = placed(split_params(model, example=inputs(shapes)))
    shown = ran(model, shapes, results)
    assert shown.first or shown.last
    assert {n for n in shown.first | shown.last if n in groups_of and groups_of[n][0] == "muon"} == set()
    followed = set(shown.last) | {n for n in groups_of if name.startswith("OwlViT")}  # its boxes alone are followed
    assert {n for n, (group, _) in groups_of.items() if group == "adamw.head"} <= followed
    vectors = {n for n in shown.first if n in groups_of and groups_of[n][0] == "adamw.vectors"}
    assert {n for n in shown.first if n in groups_of and groups_of[n][0] != "adamw.embeddings"} <= vectors | set(
        shown.last
    )


def heads(model: nn.Module) -> set[str]:
    return {name for name, (group, _) in placed(split_params(model)).items() if group == "adamw.head"}


class Distilled(nn.Module):
    """As timm's LeViT and VOLO: a tuple of heads, each a norm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))])
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
        self.head_dist = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist


def test_heads_in_a_tuple() -> None:
    model = Distilled()
    assert heads(model) == {"head.3.weight", "head_dist.1.weight"}
    assert placed(split_params(model))["head.1.weight"] == ("muon", "whole")


class Normed(nn.Module):
    """As OLMo-core's Transformer: the last norm is in a module with the output layer, which nothing but names tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(64, 8)
        self.blocks = nn.ModuleDict({"0": Mixed(8)})
        self.lm_head = Mixed(64)


class Mixed(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.norm, self.w_out = nn.LayerNorm(8), nn.Linear(8, out, bias=False)


def test_heads_that_are_modules_and_several_by_name() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 3)

    body = {"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))}
    assert heads(nn.ModuleDict({**body, "head": Deep()})) == {"head.fc2.weight"}
    several = {"cls_head": nn.Linear(8, 3), "box_head": nn.Linear(8, 4)}
    assert heads(nn.ModuleDict({**body, **several})) == {"cls_head.weight", "box_head.weight"}


def test_the_head_in_a_module_beside_its_norm() -> None:
    assert heads(Normed()) == {"lm_head.w_out.weight"}


def test_the_head_of_a_convolutional_net_with_as_many_classes_as_colours() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 3)]
    assert heads(nn.Sequential(*layers)) == {"3.weight"}


def test_a_forward_shows_the_output_layer_of_a_model_that_names_an_embedding_as_such() -> None:
    """FSMT's `get_output_embeddings` is an embedding, whose weight the last layer shares or, untied, does not."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    sizes |= {"src_vocab_size": 40, "tgt_vocab_size": 50, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = small("FSMTForConditionalGeneration", **sizes, tie_word_embeddings=False)
    groups_of = placed(split_params(model, example=inputs({"input_ids": (1, 4), "decoder_input_ids": (1, 4)})))
    assert groups_of["model.decoder.output_projection.weight"][0] == "adamw.head"
    assert groups_of["model.decoder.layers.0.fc2.weight"][0] == "muon"


def test_a_squeezed_channel_is_no_input() -> None:
    squeeze = nn.ModuleDict({"conv_reduce": nn.Conv2d(16, 4, 1), "conv_expand": nn.Conv2d(4, 16, 1)})
    parts = {"stem": nn.Conv2d(3, 16, 3), "se": squeeze, "mix": nn.Conv2d(16, 16, 3), "head": nn.Linear(16, 5)}
    groups_of = placed(split_params(nn.ModuleDict(parts)))
    assert groups_of["stem.weight"][0] == "adamw.embeddings"
    assert groups_of["se.conv_expand.weight"] == ("muon", "flatten")


def test_a_router_by_its_name() -> None:  # Gemma3n's, which mixes four streams
    mixer = nn.ModuleDict({"modality_router": nn.Linear(8, 4), "mix": nn.Linear(8, 8)})
    groups_of = placed(split_params(nn.ModuleDict({"mixer": mixer, "head": nn.Linear(8, 5)})))
    assert groups_of["mixer.modality_router.weight"][0] == "adamw.matrices"


# Weights that hold several matrices


def test_query_and_gate_of_qwen3_next() -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {
        "head_dim": 8,
        "vocab_size": 50,
        "intermediate_size": 40,
        "layer_types": ["full_attention"],
        "mlp_only_layers": [0],
    }
    for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"):
        model = small(name, **settings)
        groups_of = placed(split_params(model, example=inputs({"input_ids": (1, 4)})))
        assert groups_of["model.layers.0.self_attn.q_proj.weight"] == ("muon", ("interleaved", 2, 0, 8))
        shown = ran(model, {"input_ids": (1, 4)}, ("logits",))
        assert "model.layers.0.self_attn.q_proj.weight" in shown.cut
        assert {n for n in shown.cut if n in groups_of and groups_of[n] == ("muon", "whole")} == set()


# Weight decay


def undecayed(model: nn.Module) -> set[str]:
    groups = split_params(model, adamw={"weight_decay": 0.1})
    return {name for group in groups if group.get("weight_decay") == 0 for name in group["param_names"]}


def test_no_decay_where_the_trainer_has_none() -> None:
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    swin = {"embed_dim": 32, "depths": [1], "num_heads": [2], "image_size": 64}
    for model in (small("T5ForConditionalGeneration", **size), small("SwinForImageClassification", **swin)):
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        named = {name for group in split_params(model) for name in group["param_names"]}
        assert named - decayed <= undecayed(model)
        assert any("relative" in name for name in named - decayed)


def test_no_decay_where_a_model_or_a_parameter_says_so() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
            self.table_of_all = nn.Parameter(torch.zeros(5, 8))
            self.state = nn.Parameter(torch.zeros(8, 4))
            self.state._no_weight_decay = True  # type: ignore[attr-defined]
            self.mix = nn.Linear(8, 8)

        def no_weight_decay(self) -> set[str]:
            return {"pos_embed"}

        def no_weight_decay_keywords(self) -> set[str]:
            return {"table"}

    model = nn.ModuleDict({"backbone": Timm(), "head": nn.Linear(8, 5)})
    biases = {"backbone.mix.bias", "head.bias"}
    assert undecayed(model) == biases | {f"backbone.{n}" for n in ("pos_embed", "table_of_all", "state")}
    overridden = split_params(model, overrides={"backbone.pos_embed": {"weight_decay": 0.3}})
    assert next(g for g in overridden if "backbone.pos_embed" in g["param_names"])["weight_decay"] == 0.3


def test_methods_of_the_same_names_with_arguments_are_no_answers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

        def get_classifier(self, classes: int) -> nn.Module:
            return nn.Linear(8, classes)

        def no_weight_decay(self, name: str) -> bool:
            return name == "body.weight"

        def no_weight_decay_keywords(self) -> None:
            return None

    groups = split_params(Model())
    assert placed(groups)["body.weight"][0] == "muon"
    assert placed(groups)["last.weight"][0] == "adamw.head"
    assert undecayed(Model()) == {"body.bias", "last.bias"}


class Pointwise(nn.Module):  # timm's MaxxVit, and what else holds q, k and v in a convolution with its norm
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.split(self.qkv(x), [8, 8, 8], dim=1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_convolution_is_cut_as_a_forward_cuts_its_output() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Pointwise())
    groups_of = placed(split_params(model, example=(torch.ones(2, 3, 3, 3),)))
    assert groups_of["1.qkv.0.weight"] == ("muon", ("flatten", ("rows", 8, 8, 8)))
    cuts = flow(model[1], model[1](torch.ones(2, 8, 3, 3))).cut["qkv.0.weight"]
    assert sorted(map(sorted, cuts)) == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_an_error_inside_a_method_of_the_user_is_seen() -> None:
    class Broken(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            return self[1] + 3  # type: ignore[operator, no-any-return]

    class Misspelt(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            return self[1].weight.nothing  # type: ignore[no-any-return, attr-defined]

    class Raising(nn.Sequential):
        def no_weight_decay(self) -> set[str]:
            raise AttributeError("no table of names")

    for kind, error, said in (
        (Broken, TypeError, "unsupported operand"),
        (Misspelt, AttributeError, "nothing"),
        (Raising, AttributeError, "no table of names"),
    ):
        with pytest.raises(error, match=said):
            split_params(kind(nn.Linear(8, 8), nn.Linear(8, 2)))


def test_a_method_that_a_class_leaves_to_others_says_nothing() -> None:
    class Abstract(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            raise NotImplementedError

    groups_of = placed(split_params(Abstract(nn.Linear(8, 8), nn.Linear(8, 2))))
    assert (groups_of["0.weight"][0], groups_of["1.weight"][0]) == ("muon", "adamw.head")
