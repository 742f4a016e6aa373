"""One step of Megatron-Core's optimizers and of ours, on a small GPT with tensor and data parallelism.

    make .venv-megatron/.ready                                              # megatron-core in an environment of its own
    .venv-megatron/bin/python -m benchmarks.megatron_step --json benchmarks/results/megatron_step.json
    .venv-megatron/bin/python -m benchmarks.megatron_step --hidden 64 --rounds 3       # something quick

Four gloo ranks of one thread, TP 2 × DP 2, fp32 weights. Every contender has a model of its own in the same four
processes, with the same weights and the same gradients (one backward pass of Megatron's schedule, kept and put back
before each step), and they take turns, A B C A B C. Megatron's Muon takes part where emerging_optimizers is installed,
with DistributedDataParallel: it refuses the distributed optimizer. It is set to the rule that all are compared by:
momentum as an average, Nesterov, the "quintic" coefficients, five steps, the scale √max(rows, cols), decay 0.1.

Columns: milliseconds of ``optimizer.step()``, median and middle half; MiB that a rank hands to collectives in it,
without the parameters that the distributed optimizer gathers; MiB of state a rank; and by how much the first update of
a matrix differs from the fp64 oracle's, relative, in the median and at worst over all of Muon's matrices.

emerging_optimizers 0.1.0, a checkout on PYTHONPATH, is what 0.16.1's Muon calls; it imports triton and absl-py.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from benchmarks.contenders import Entries
from benchmarks.report import print_rows, quartiles, write_json
from tests.support.workers import Pool
from torch import Tensor

RULE = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "scale_mode": "spectral", "ns_coefficients": "quintic"}
WEIGHT_DECAY = 0.1
MODES = ("blockwise", "duplicated", "distributed")
"""What Megatron's Muon does about tensor parallelism."""

COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "broadcast", "isend"), 0),
    **dict.fromkeys(("all_to_all_single", "all_gather", "reduce_scatter", "all_gather_into_tensor"), 1),
}
"""What sends, and which argument it sends. On gloo ours sends messages."""


def contenders() -> dict[str, tuple[bool, Any]]:
    """For each contender whether it has the distributed optimizer, and what makes its optimizer."""
    from megatron.core.optimizer import get_megatron_optimizer as theirs

    from muonmesh.integrations.megatron import get_megatron_optimizer as ours

    optimizers: dict[str, tuple[bool, Any]] = {
        "muonmesh bf16": (False, lambda config, chunks: ours(config, chunks, muon=RULE)),
        "muonmesh bf16, distributed optimizer": (True, lambda config, chunks: ours(config, chunks, muon=RULE)),
        "muonmesh fp32": (False, lambda c, chunks: ours(c, chunks, muon={**RULE, "compute_dtype": torch.float32})),
        "Megatron AdamW": (False, theirs),
        "Megatron AdamW, distributed optimizer": (True, theirs),
    }
    try:
        import emerging_optimizers  # noqa: F401
    except ImportError:
        return optimizers
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    for mode, layer_wise in (*((mode, False) for mode in MODES), ("blockwise", True), ("duplicated", True)):

        def make(config: Any, chunks: Any, mode: str = mode, layer_wise: bool = layer_wise) -> Any:
            config.optimizer, config.muon_tp_mode, config.muon_use_nesterov = "muon", mode, True
            return get_megatron_muon_optimizer(config, chunks, layer_wise_distributed_optimizer=layer_wise)

        optimizers[f"Megatron {'layer-wise ' if layer_wise else ''}Muon {mode}"] = (False, make)
    return optimizers


class Contest:
    """One contender on this rank: its model, its optimizer, and the gradients of its steps."""

    def __init__(self, flat: bool, make: Any, hidden: int, layers: int) -> None:
        from tests.megatron import gathered, host

        sizes = {"hidden_size": hidden, "ffn_hidden_size": 3 * hidden, "kv_channels": hidden // 4}
        self.shape = host.Shape(tp=2, flat=flat, model=(*sizes.items(), ("num_layers", layers)))
        self.chunks = host.chunks_of(self.shape)
        config = host.optimizer_config(self.shape, weight_decay=WEIGHT_DECAY)
        self.optimizer = make(config, self.chunks)
        host.backward(self.shape, self.chunks, None, 0)
        self.parameters = gathered.named(self.chunks)
        self.gradients = {name: parameter.main_grad.clone() for name, parameter in self.parameters.items()}
        self.gathered = gathered

    def step(self) -> float:
        """Put the gradients back and step; return the milliseconds of the step."""
        for name, parameter in self.parameters.items():
            parameter.main_grad.copy_(self.gradients[name])
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.step()
        return 1e3 * (time.perf_counter() - begin)

    def bytes_moved(self) -> int:
        """Bytes that this rank hands to collectives in a step."""
        moved = 0
        real = {name: getattr(dist, name) for name in COLLECTIVES}

        def counting(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal moved
                tensor = args[COLLECTIVES[name]]
                tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
                moved += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
                return real[name](*args, **kwargs)

            return call

        for name in COLLECTIVES:
            setattr(dist, name, counting(name))
        try:
            self.step()
        finally:
            for name, function in real.items():
                setattr(dist, name, function)
        return moved

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        total = 0
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in optimizer.optimizer.state.values():
                for value in state.values():
                    local = getattr(value, "_local_tensor", value)
                    total += local.numel() * local.element_size() if isinstance(local, Tensor) else 0
        return total

    def distances(self) -> list[float]:
        """Step once and compare each of Muon's matrices with the oracle's update, relative in the Frobenius norm."""
        from tests.megatron.oracle import MATRICES
        from tests.support.reference import split

        from muonmesh.numerics.coefficients import coefficient_schedule

        gather, local_parts = self.gathered.gather, self.gathered.local_values
        before = gather(local_parts(self.parameters))
        gradients = gather(local_parts(self.parameters, self.gathered.gradients(self.chunks)))
        self.step()
        after = gather(local_parts(self.parameters))
        distances = []
        heads = self.chunks[0].config.kv_channels
        for name, gradient in gradients.items():
            spec = next((spec for end, spec in MATRICES.items() if name.endswith(end)), None)
            if spec is None:
                continue
            if name.endswith("linear_qkv.weight"):
                spec = ("interleaved", (2 * heads, heads, heads), 0)
            if spec == "halves":
                spec = ("rows", len(gradient) // 2, len(gradient) // 2)
            moved = before[name].double() * (1 - 0.02 * WEIGHT_DECAY) - after[name].double()
            for update, raw in zip(split(moved, spec), split(gradient.double(), spec), strict=True):
                exact = 0.02 * max(raw.shape) ** 0.5 * orthogonal(raw, coefficient_schedule("quintic", 5))
                distances.append(float((update - exact).norm() / exact.norm()))
        return distances


def orthogonal(matrix: Tensor, schedule: Any) -> Tensor:
    """The polynomials on the singular values, in fp64."""
    from tests.support.reference import polar

    return polar(matrix, schedule)


def measure(hidden: int, layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """All contenders on this rank."""
    from tests.megatron import host

    host.begin(host.Shape(tp=2))
    contests, problems = {}, {}
    for name, (flat, make) in contenders().items():
        try:
            contests[name] = Contest(flat, make, hidden, layers)
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
    results: dict[str, dict[str, Any]] = {name: {"problem": problem} for name, problem in problems.items()}
    for name, contest in contests.items():
        distances = contest.distances() if "AdamW" not in name else []
        results[name] = {"distances": distances, "milliseconds": []}
    for _ in range(rounds):
        for name, contest in contests.items():
            gc.collect()
            results[name]["milliseconds"].append(contest.step())
    for name, contest in contests.items():
        results[name] |= {"bytes": contest.bytes_moved(), "state": contest.state_bytes()}
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    pool = Pool(4)
    try:
        ranks = pool.run(measure, options.hidden, options.layers, options.rounds, timeout=1200.0)
    finally:
        pool.close()
    rows, tables = [], dict[str, Any]()
    base = statistics.median(max(r["muonmesh bf16"]["milliseconds"][i] for r in ranks) for i in range(options.rounds))
    for name, first in ranks[0].items():
        if "problem" in first:
            rows.append([name, "", "", "", "", "", first["problem"][:60]])
            continue
        slowest = [max(rank[name]["milliseconds"][i] for rank in ranks) for i in range(options.rounds)]
        low, _, high = quartiles(slowest)
        moved, state = (max(rank[name][key] for rank in ranks) / 2**20 for key in ("bytes", "state"))
        away = first["distances"]
        distance = f"{statistics.median(away):.1e}, {max(away):.1e}" if away else ""
        median = statistics.median(slowest)
        rows.append(
            [
                name,
                f"{median / base:.2f}",
                f"{median:.1f}",
                f"{low:.1f}–{high:.1f}",
                f"{moved:.2f}",
                f"{state:.2f}",
                distance,
            ]
        )
        tables[name] = {"milliseconds": slowest, "mib_moved": moved, "mib_state": state, "distances": away}
    title = f"TP 2 × DP 2, {options.layers} layers of hidden size {options.hidden} (ratio: time over ours with bf16)"
    print_rows(title, ["", "ratio", "median ms", "middle half", "MiB moved", "MiB state", "distance"], rows)
    if options.json:
        facts = {"hidden": options.hidden, "layers": options.layers, "rounds": options.rounds}
        write_json(options.json, "benchmarks/megatron_step.py", Entries((), (), {}), {title: tables}, facts)


if __name__ == "__main__":
    main()
