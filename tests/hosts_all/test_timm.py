"""A hundred models of timm on `meta`: their input layers, output layers and fused weights by their graph.

The Makefile has `without_torchvision_ops` imported before timm. As `tests/groups/test_model_zoo.py`, with models
by name.
"""

from __future__ import annotations

import re

import pytest
import timm
import torch

from muonmesh.groups import split_params
from tests.support.dataflow import differences

NAMES = """
aimv2_1b_patch14_224 bat_resnext26ts beit3_base_patch16_224 beit_base_patch16_224 beitv2_base_patch16_224
botnet26t_256 caformer_b36 cait_m36_384 coat_lite_medium coatnet_0_224 coatnext_nano_rw_224 convformer_b36
convit_base convmixer_768_32 convnext_atto convnextv2_atto cpubone_b0_bfrobust crossvit_9_240 cs3darknet_focus_l
csatv2 cspdarknet53 cspnext_l cspresnet50 cspresnext50 darknet17 darknetaa53 davit_base deepseek_vit_412m
deit3_base_patch16_224 densenet121 densenetblur121d dla34 dm_nfnet_f0 dpn48b eca_botnext26ts_256 eca_nfnet_l0
eca_resnet33ts eca_vovnet39b ecaresnet26t ecaresnetlight ecaresnext26t_32x4d edgenext_base efficientformer_l1
efficientformerv2_l efficientnet_b0 efficientnetv2_l efficientvim_m1 efficientvit_b0 efficientvit_m0
ese_vovnet19b_dw eva02_base_patch14_224 eva_large_patch14_196 fasternet_l fastvit_ma36 fbnetc_100 fbnetv3_b
flexivit_base focalnet_base_lrf gc_efficientnetv2_rw_t gcresnet33ts gcresnext26ts gcvit_base gemma4_vit_167m
gernet_l ghostnet_050 ghostnetv2_100 gmixer_12_224 gmlp_b16_224 halo2botnet50ts_256 halonet26t haloregnetz_b
hardcorenas_a hgnet_base hgnetv2_b0 hiera_base_224 hieradet_small hrnet_w18 iformer_h inception_next_atto
inception_resnet_v2 inception_v3 inception_v4 lambda_resnet26rpt_256 lamhalobotnet50ts_256 lcnet_035 lcnetv2_base
legacy_senet154 legacy_xception levit_128 lowformer_b0 mambaout_base maxvit_base_tf_224 maxxvit_rmlp_nano_rw_256
maxxvitv2_nano_rw_256 mixer_b16_224 mixnet_l mnasnet_050 mobilenet_edgetpu_100 mobilenetv1_100 mobilenetv3_large_075
mobilenetv5_300m mobileone_s0 mobilevit_s mobilevitv2_050
"""
MODELS = NAMES.split()

# The kind, an expression for the name, and the reason; see docs/groups.md.
KNOWN: list[tuple[str, str, str]] = [
    ("cut", r"\.pwise\.", "CPUBone and LowFormer hold q, k and v in a convolution of a Sequential of several"),
    ("cut", r"modulation\.f\.", "FocalNet cuts it by the width of its input, which its code does not tell"),
    ("cut", r"blocks\.\*\.fc1", "MambaOut cuts it by sizes in a list of the module"),
    (
        "cut",
        r"blocks\.\*\.\*\.conv_pw\.",
        "MixNet's one product, whose channels depthwise filters of several sizes share",
    ),
    ("first", r"rel_pos\.mlp\.fc1", "reads two coordinates, as many as its sibling makes where there are two heads"),
    ("first", r"pos_embd\.token_projection|attn\.pos_proj", "EdgeNeXt's and ConViT's, which read fixed positions"),
    ("not first", r"attn\.conv\.|conv_lambda", "squeezed channels of CSATv2, and the one channel of a lambda layer"),
]


@pytest.mark.parametrize("name", MODELS)
def test_ends_and_cuts_are_as_the_graph_shows(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.empty(2, *model.pretrained_cfg.get("input_size", (3, 224, 224)))
        groups = split_params(model, example=images)  # copies the model, in which a forward may leave what has no copy
        outputs = model(images)
    heads = getattr(model, "num_classes", 0) > 0
    wrong = differences(model, groups, outputs, outputs, heads=heads)
    assert {(kind, n) for kind, n in wrong if not any(k == kind and re.search(e, n) for k, e, _ in KNOWN)} == set()


def test_a_hundred_models() -> None:
    assert len(set(MODELS)) >= 100
