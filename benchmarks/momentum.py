"""Record the momentum of a GPT-2 that learns the standard library byte by byte, for benchmarks/iterations.py.

    python benchmarks/momentum.py --out momentum.safetensors          # two layers of 768, steps 21 and 159

What is written are the directions that Muon orthogonalises, fp32, the fused q, k, v cut into its three matrices, under
names such as 159.0.attn.c_attn.k. Needs transformers and safetensors.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import muonmesh as mm

MOMENTUM, CONTEXT, BATCH, FILES = 0.95, 128, 4, 60


def text() -> Tensor:
    """Bytes of some of the standard library, int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def directions(model: GPT2LMHeadModel, optimizer: mm.Muon, step: int) -> dict[str, Tensor]:
    """Nesterov's directions of the matrices inside the blocks, before this step."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2 or ".c_" not in name:
            continue
        assert parameter.grad is not None
        kept = optimizer.state[parameter]["momentum_buffer"]
        direction = kept.lerp(parameter.grad, 1 - MOMENTUM).lerp(parameter.grad, 1 - MOMENTUM)
        short = f"{step}.{name.removeprefix('transformer.h.').removesuffix('.weight')}"
        if "c_attn" in name:
            q, k, v = direction.split(parameter.shape[0], dim=1)
            found |= {f"{short}.q": q.contiguous(), f"{short}.k": k.contiguous(), f"{short}.v": v.contiguous()}
        else:
            found[short] = direction
    return found


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--at", type=int, nargs="+", default=[21, 159], help="steps, from 2 on")
    options = parser.parse_args()
    torch.manual_seed(0)
    heads = max(1, options.width // 64)
    sizes = {"n_embd": options.width, "n_layer": options.layers, "n_head": heads, "n_positions": CONTEXT}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    optimizer = mm.from_model(model, lr=1e-3, momentum=MOMENTUM)
    data, found = text(), dict[str, Tensor]()
    for step in range(1, max(options.at) + 1):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([data[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        if step in options.at:
            found |= directions(model, optimizer, step)
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
        optimizer.step()
    save_file(found, options.out)


if __name__ == "__main__":
    main()
