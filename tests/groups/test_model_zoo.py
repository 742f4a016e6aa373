"""Every model class of `transformers` that its own configuration can build on `meta`: ends and cuts by its graph.

A forward on `meta` shows which layers read data, which make the results, and which outputs are cut into several
(`tests/support/dataflow.py`). `split_params` must say the same of each with an example; what it does not is in
`KNOWN`, by name and reason. A class that cannot be built or run this way is counted with its reason, and 600 must run.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter

import pytest
import torch
import transformers

from muonmesh import split_params
from tests.support import influence, zoo
from tests.support.dataflow import differences, tensors

CHOSEN = {
    "BertForMaskedLM",
    "BloomForCausalLM",
    "CamembertForMaskedLM",
    "ConvNextForImageClassification",
    "DeepseekV3ForCausalLM",
    "GPT2ForSequenceClassification",
    "Glm4MoeLiteForCausalLM",
    "MixtralForCausalLM",
    "MobileViTV2ForImageClassification",
    "PatchTSMixerForPrediction",
    "Qwen3ForCausalLM",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
}

LARGE = {  # minutes each, on `meta` too
    "Cohere2VisionForConditionalGeneration",
    "PerceiverForImageClassificationLearned",
    "Sam2HieraDetModel",
    "Sam2Model",
    "Sam2VisionModel",
    "SamHQVisionModel",
    "SamVisionModel",
    "TimesformerModel",
    "UnivNetModel",
    "UnlimitedOcrForConditionalGeneration",
    "UnlimitedOcrModel",
    "VJEPA2ForVideoClassification",
}

# What is known to differ: the kind, an expression for the name, the reason. The first that fits counts.
KNOWN: list[tuple[str, str, str]] = [
    (
        "first",
        r"relative_k_proj|linear_pos\b|continuous_position_bias_mlp",
        "reads fixed positions, in each block: a hidden matrix of the block",
    ),
    (
        "first",
        r"(decoder|lstm|rnn|cell)\..*weight_hh|hidden_to_hidden|\.rnn\.",
        "its first state is zero and no weight's",
    ),
    ("first", r"decoder\.layers\.\*\.self_attn\.v_proj", "the queries of a DETR start at zero"),
    ("first", r"qkv_proj\.v_proj_delayed", "reads a state of zeros"),
    ("first", r"objectness_head\.", "reads what is detached from the graph"),
    (
        "first",
        r"\bhead\.q_proj|ref_point_head|box_rpb_embed|query_pos_head\.layers",
        "reads learned or detached numbers",
    ),
    ("first", r"duration_delta_proj|audio_latent_proj", "its inputs are as many as a layer before it makes"),
    ("first", r"decoder\.prenet\.layers", "mel bins, as many as the postnet makes"),
    ("not first", r"xpath_unitseq2_inner", "reads embeddings that are registered after it, side by side"),
    ("not first", r"prompt_projector", "reads frames and a prompt's one-hot numbers, side by side"),
    ("not first", r"encoder\.conv\.conv_layers", "Speech2Text has 80 mel bins; what it was given were not its first"),
    ("not first", r"inject_scale", "a few numbers of a series' scale"),
    ("not last", r"inject_scale", "a few numbers of a series' scale"),
    ("not last", r"sequence_summary\.summary", "as wide as the labels, and one layer more picks of them"),
    ("not last", r"(char|bpe|wp)_a3_module", "attention pools by it; nothing in the registration tells"),
    (
        "not last",
        r"tdnn|head\.conv_final|upsample\.|structure_",
        "outside the base model, and read in a form of its own",
    ),
    ("not last", r"(text|visual)_projection|transformation", "its result is named like a hidden state"),
    ("not last", r"patch_embeddings|head\.o_proj", "its result is named like a hidden state"),
    ("last", r"(text|visual)_projection", "projects into the space of two towers: a hidden matrix, read by the other"),
    (
        "last",
        r"entity_linker|splinter_qass|global_pointer|mask_query_head|encoder_mask_output|class_head\.dense0",
        "factors of a product",
    ),
    ("last", r"(bbox_embed|class_embed|enc_bbox_head)\.", "PPDocLayoutV4's: eight numbers, as a block may make too"),
    ("last", r"cls\.predictions\.transform", "the head's weight is two parameters side by side"),
    ("last", r"feature_extractor", "its result is what a loss reads, and the logits are made of it"),
    ("last", r"inputs_embeds_projector|tapas\.", "the logits are made by bare parameters"),
    ("last", r"^model\.layers\.\*\.(mlp|self_attn)", "the logits are made by bare parameters"),
    ("cut", r"self_attn\.v_proj", "DiffLlama's values of two halves of the heads, which one query reads side by side"),
    ("cut", r"modulation\.projection_in", "FocalNet cuts it by the width of its input, which its code does not tell"),
    ("cut", r"linear_attn\.in_proj_ba", "two small gates of Qwen3-Next"),
    ("cut", r"decoder_global_pointer\.dense", "q and k of a pointer, drawn through a dropout"),
    ("cut", r"gate_up_proj_adapter_list", "an adapter of Zamba 2"),
]

ran: set[str] = set()
left_out: dict[str, str] = {}


def judged(name: str) -> set[tuple[str, str]]:
    """What differs and is not known; nothing, and a reason in `left_out`, of what does not run."""
    stage = "build"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = zoo.build(name)
            stage = "run"
            with zoo.numbers_on_meta():
                outputs, results = zoo.run(model)
                groups = split_params(model, example=zoo.inputs(model))
    except Exception as error:
        left_out[name] = f"cannot {stage}: {type(error).__name__}"
        return set()
    ran.add(name)
    heads = getattr(model, "base_model", None) is not model and not name.endswith("Backbone")
    misjudged = differences(model, groups, outputs, results, heads=heads)
    return {(kind, n) for kind, n in misjudged if not any(k == kind and re.search(e, n) for k, e, _ in KNOWN)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.soak) for name in zoo.names()]
)
def test_ends_and_cuts_are_as_the_graph_shows(name: str) -> None:
    transformers.logging.set_verbosity_error()
    if name in LARGE or not zoo.is_model(name):
        left_out[name] = "large" if name in LARGE else "no model with a configuration"
        return
    assert judged(name) == set()
    assert name in ran or name not in CHOSEN


@pytest.mark.soak
def test_enough_of_them_ran() -> None:
    for reason, count in Counter(left_out.values()).most_common():
        print(f"{count}: {reason}")
    print(f"{len(ran)} ran")
    if len(ran) + len(left_out) == len(zoo.names()):
        assert len(ran) >= 600


def observed(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], influence.Influence, list[torch.Tensor]]:
    """A small model of a class, its inputs, what influences what in it, and its results."""
    torch.manual_seed(0)
    model = zoo.ready(getattr(transformers, name)(zoo.small_config(name, 8 if name.startswith("Bloom") else 16)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 / max(1, parameter[0].numel()) ** 0.5) if parameter.dim() > 1 else None
    example = next(zoo.drawn(model))
    observer = influence.Influence(model, example.values())
    with observer:
        outputs = model(**example)
    return model, example, observer, list(tensors({k: v for k, v in outputs.items() if not zoo.INTERNAL.search(k)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BloomForCausalLM", "GPT2LMHeadModel", "JetMoeForCausalLM"])
def test_an_example_shows_what_changed_rows_reach(name: str) -> None:
    """All classes: `benchmarks/studies/model_roles.py`."""
    model, example, observer, results = observed(name)
    groups = split_params(model, example=example)
    assert list(influence.differences(model, groups, observer, results, lambda: model(**example))) == []


@pytest.mark.slow
def test_changed_rows_show_a_wrong_split() -> None:
    model, example, observer, results = observed("GPT2LMHeadModel")
    wrong = {r"c_attn\.weight": {"algorithm": "muon", "matrices": ("transposed", "whole")}}
    wrong[r"mlp\.c_fc\.weight"] = {"algorithm": "muon", "matrices": ("transposed", ("heads", 2, 0))}
    groups = split_params(model, example=example, overrides=wrong)
    wrong_splits = list(influence.differences(model, groups, observer, results, lambda: model(**example)))
    expected = [("cut", f"transformer.h.{i}.attn.c_attn.weight") for i in range(2)]
    assert sorted(wrong_splits) == [*expected, *(("joined", f"transformer.h.{i}.mlp.c_fc.weight") for i in range(2))]
