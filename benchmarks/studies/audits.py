"""What `muonmesh audit` says of published optimizers: a script for the command, and their reports.

    muonmesh audit benchmarks/studies/audits.py torch_muon
    torchrun --nproc-per-node 2 --no-python muonmesh audit benchmarks/studies/audits.py torch_muon_fsdp2
    python -m benchmarks.studies.audits --peer dion=PATH --peer keller_jordan=PATH       # into results/audits.md

A peer that is no installed package is a checkout: of microsoft/dion, and of KellerJordan/Muon.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "audits.md"
REPORTS = {  # by the maker: what the title says, ranks
    "torch_muon_fsdp2": ("torch.optim.Muon and AdamW of torch {torch}, FSDP2", 2),
    "keller_jordan_ddp": ("MuonWithAuxAdam of KellerJordan/Muon, DDP", 2),
    "dion_fsdp2": ("Muon of microsoft/dion, FSDP2", 2),
    "deepspeed_muon": ("MuonWithAuxAdam of DeepSpeed {deepspeed}, one process", 1),
    "muonium": ("muonium {muonium}, one process", 1),
    "heavyball_fsdp2": ("HeavyBall {heavyball}, its Muon for all weights, FSDP2", 2),
}


def gpt2(wrap: str = "") -> nn.Module:
    """A small GPT-2, whose c_attn holds q, k and v, after one backward; wrapped by "ddp" or "fsdp2"."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 32}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    if wrap and not dist.is_initialized():
        dist.init_process_group("gloo")
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    tokens = torch.arange(32).reshape(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return model  # type: ignore[no-any-return]


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, as the READMEs of these optimizers tell one to take them, and the rest."""
    named = list(model.named_parameters())
    inside = [p for name, p in named if p.ndim == 2 and ".h." in name]
    return inside, [p for name, p in named if p.ndim != 2 or ".h." not in name]


def torch_muon(wrap: str = "") -> tuple[nn.Module, Any]:
    model = gpt2(wrap)
    matrices, others = halves(model)
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]


def torch_muon_fsdp2() -> tuple[nn.Module, Any]:
    return torch_muon("fsdp2")


def keller_jordan_ddp() -> tuple[nn.Module, Any]:
    sys.path.insert(0, os.environ["KELLER_JORDAN"])
    from muon import MuonWithAuxAdam

    model = gpt2("ddp")
    matrices, others = halves(model)
    return model, MuonWithAuxAdam([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def dion_fsdp2() -> tuple[nn.Module, Any]:
    sys.path.insert(0, os.environ["DION"])
    from dion import Muon

    model = gpt2("fsdp2")
    matrices, others = halves(model)
    mesh = others[0].device_mesh  # type: ignore[attr-defined]
    return model, Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}], distributed_mesh=mesh, lr=0.02)


def deepspeed_muon() -> tuple[nn.Module, Any]:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    model = gpt2()
    matrices, others = halves(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return model, SingleDeviceMuonWithAuxAdam(groups)


def muonium() -> tuple[nn.Module, Any]:
    from muonium import Muon
    from muonium.orthogonalize import orthogonalize

    orthogonalize.pe_loop_triton = orthogonalize.pe_loop  # without the kernels that need CUDA
    model = gpt2()
    matrices, others = halves(model)
    return model, Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}], lr=0.02)


def heavyball_fsdp2() -> tuple[nn.Module, Any]:
    import heavyball

    model = gpt2("fsdp2")
    heavyball.utils.compile_mode = None
    return model, heavyball.Muon(model.parameters(), lr=0.02)


def main() -> None:
    """Step what one maker makes, for the command to watch; or write all reports into the page."""
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maker", nargs="?", help="step its optimizers, which muonmesh audit watches")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PATH of a checkout")
    parser.add_argument("--only", help="one maker")
    arguments = parser.parse_args()
    if arguments.maker:
        optimizers = globals()[arguments.maker]()  # with the model, which names the weights
        for optimizer in optimizers[1] if isinstance(optimizers[1], list) else [optimizers[1]]:
            optimizer.step()
        return
    paths = {name.upper(): path for name, _, path in (peer.partition("=") for peer in arguments.peer)}
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    page = PAGE.read_text()
    for maker, (title, ranks) in REPORTS.items():
        if arguments.only in (None, maker):
            run = [sys.executable, "-c", "from muonmesh.tools.cli import main; main()", "audit", __file__, maker]
            run = run if ranks == 1 else [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", "--no-python", *run,
            ]  # fmt: skip
            process = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
            if not process.stdout:
                raise SystemExit(process.stderr)
            packages = [part.partition("}")[0] for part in title.split("{")[1:]]
            heading = title.format(**{name: version(name) for name in packages})
            launch = "" if ranks == 1 else f"torchrun --nproc-per-node {ranks} --no-python "
            command = f"$ {launch}muonmesh audit benchmarks/studies/audits.py {maker}"
            lines = [line for line in process.stdout.splitlines() if " [WARNING] " not in line]
            text = "\n".join([f"### {heading}", "", "```", command, *lines, "```", ""])
            begin, end = f"<!-- {maker} -->\n", f"<!-- end {maker} -->"
            page = page.partition(begin)[0] + begin + text + end + page.partition(end)[2]
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
