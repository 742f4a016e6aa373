"""timm with Muon: start timm's ``train.py`` with this script, from the same folder and with the same arguments."""

import runpy

import timm.optim

import muonmesh as mm


def create(model, opt, lr, weight_decay, momentum, layer_decay_min_scale):
    """Return the optimizer; ``--layer-decay`` and other arguments raise an error, because this function lacks them."""
    return mm.from_model(model, lr=lr, weight_decay=weight_decay, momentum=momentum, process_group="auto")


timm.optim.create_optimizer_v2 = create
runpy.run_path("train.py", run_name="__main__")
