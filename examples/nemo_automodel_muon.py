"""NeMo AutoModel with Muon: name ``MuonConfig`` as the optimizer's ``_target_``."""

from dataclasses import dataclass
from typing import ClassVar

from nemo_automodel.components.optim.optimizer import OptimizerConfig

import muonmesh


@dataclass
class MuonConfig(OptimizerConfig):
    supports_megatron_fsdp_sharding: ClassVar[bool] = False  # refuses Megatron-FSDP
    lr: float = 3e-4
    weight_decay: float = 0.1

    def build(self, model, *, device_mesh=None, is_peft=False):
        parts = getattr(model, "parts", [model])
        made = [muonmesh.from_model(part, lr=self.lr, weight_decay=self.weight_decay) for part in parts]
        for group in (group for optimizer in made for group in optimizer.param_groups):
            group["wd_mult"] = float(group["weight_decay"] > 0)  # else AutoModel decays norms and biases
        return made
