"""Lets Accelerate take the CPU for an accelerator whose collectives are gloo's; ms-swift imports it as a plugin.

Accelerate 1.15 knows FSDP and DeepSpeed on accelerators only; on a CPU it trains DDP, without a word. It is all that is
not real in the tests of ms-swift under them. (DeepSpeed is kept from compiling an operation for its own reductions on a
CPU; gloo's are used.)
"""

import os

import deepspeed
from accelerate import DistributedType
from accelerate.state import PartialState

PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
