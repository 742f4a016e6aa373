"""The time that the watch of the first training forward takes, in that forward and in later ones.

    python benchmarks/roles.py
    python benchmarks/roles.py --json benchmarks/results/roles.json

A decoder of Llama's form with about 2,000 parameters on one thread. Reported are the seconds of its first forward
without a watch, the seconds that the watch's reading of the graph adds to it, and their ratio. For later forwards the
hook is gone, which is checked and not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import muonmesh as mm
from muonmesh.groups.watch import Watch

LAYERS, SEQUENCES, TOKENS = 222, 4, 256
WIDTHS = (128, 256)


class Timed(Watch):
    """A watch that notes the seconds of its reading."""

    seconds = 0.0

    def read(self, model: nn.Module, outputs: Any) -> None:
        """Read as a watch does."""
        begin = time.perf_counter()
        super().read(model, outputs)
        self.seconds = time.perf_counter() - begin


def timed(width: int) -> dict[str, float]:
    """Return the figures of a decoder of this width."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": LAYERS, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tokens = torch.randint(512, (SEQUENCES, TOKENS))
    watch = Timed(model, {})
    begin = time.perf_counter()
    model(input_ids=tokens, labels=tokens, use_cache=False)
    seconds = time.perf_counter() - begin - watch.seconds
    assert watch.seen is not None
    assert not model._forward_hooks
    found = {"width": width, "parameters": len(list(model.parameters())), "first_forward_s": seconds}
    return {**found, "watch_s": watch.seconds, "ratio": watch.seconds / seconds}


def main() -> None:
    """Print a line for each width, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [timed(width) for width in WIDTHS]
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if given.json is not None:
        record = {"torch": torch.__version__, "muonmesh": mm.__version__, "threads": 1, "rows": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
