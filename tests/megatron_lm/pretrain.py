"""Megatron-LM's own pretrain_gpt.py on a CPU, unchanged, with muonmesh's optimizer by `install`.

A program: ``python -m tests.megatron_lm.pretrain CHECKOUT FOLDER RUNS``, where RUNS is JSON: for each run the arguments
of the script. Two ranks are forked from one process that has imported everything; what rank R of run N prints is in
FOLDER/N.R.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from tests.megatron import cpu, host  # noqa: E402

RANKS = 2


def nothing(*_: Any, **__: Any) -> None: ...


def on_cpu() -> None:
    """Answer what the scripts ask of a device, beyond what megatron-core asks."""
    cpu.install()
    device = SimpleNamespace(major=9, minor=0, total_memory=1 << 34, multi_processor_count=1, name="cpu")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: device,
        **dict.fromkeys(("set_device", "empty_cache", "reset_peak_memory_stats"), nothing),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))  # type: ignore[attr-defined]
        module.manual_seed_all = module.manual_seed  # type: ignore[attr-defined]


def rank_of(script: str, arguments: list[str], log: Path, rank: int, port: int) -> None:
    """Be one rank; does not return."""
    into, code = os.open(log, os.O_CREAT | os.O_WRONLY), 0
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    from muonmesh.integrations.megatron import install

    install(muon={"lr": 0.02})
    sys.argv = [script, *arguments]
    try:
        with host.writers():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(checkout: str, folder: str, runs: str) -> None:
    torch.set_num_threads(1)
    on_cpu()
    import megatron
    from megatron.core.datasets import utils

    sys.path.insert(1, checkout)  # behind this repository, whose package of tests spawned processes import, too
    megatron.__path__.append(f"{checkout}/megatron")  # what the wheel lacks; megatron.core is the wheel's
    utils.compile_helpers = nothing  # the wheel has them compiled, and no Makefile
    if (Path(checkout) / "megatron" / "legacy").is_dir():  # until 0.16
        from megatron.legacy import fused_kernels

        fused_kernels.load = nothing  # which asks nvcc
    script = f"{checkout}/pretrain_gpt.py"
    runpy.run_path(script, run_name="imported")
    codes = []
    for number, arguments in enumerate(json.loads(runs)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(RANKS):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                rank_of(script, arguments, Path(folder) / f"{number}.{rank}", rank, port)
        codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
