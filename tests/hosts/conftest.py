"""What the tests with real hosts share: ranks that have imported what takes long, once and not once a rank."""

from __future__ import annotations

import multiprocessing
import os

from tests.support import workers

# No host may look for a hub, a dashboard or a newer version of itself.
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "DO_NOT_TRACK": "1", "DS_BUILD_OPS": "0"}

HOSTS = (
    "accelerate",
    "transformers.trainer",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "lightning",
)
multiprocessing.set_forkserver_preload(
    [workers.__name__, "muonmesh.build", "muonmesh.integrations.qk_clip", *workers.MODELS, "deepspeed", *HOSTS]
)
