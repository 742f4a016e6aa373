"""Backward and step on DeepSpeed's engine: its own Muon and ours, minus the same engine with plain SGD.

    python -m benchmarks.deepspeed_step --json benchmarks/results/deepspeed_step.json
    python -m benchmarks.deepspeed_step --stages 2 --layers 1 --rounds 3 --contenders gram   # something quick
    python -m benchmarks.deepspeed_step --stages 3 --reduce-scatter                          # which its Muon refuses

Three GPT-2-small layers by default (--shapes, --layers) on two gloo ranks of one thread. Every contender has an engine
of its own in the same two processes, with the same config, weights and gradients; they take turns, A B C A B C. At
stages 1 and 2 DeepSpeed's Muon orthogonalizes inside backward, so backward and step are timed together; SGD's time of
the same round is what the engine takes without Muon, and is subtracted.

The loss is linear in the weights, so the gradient of a rank is what its forward is given, and the reduced gradient is
known exactly. All compute the rule of DeepSpeed's Muon: momentum as an average, Nesterov, Jordan's coefficients, five
steps, √max(1, rows/cols), decoupled decay. One update is compared with the same rule in fp64. ("muonmesh polar"
has our default coefficients and is compared with the fp64 rule that has them too.)
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import logging
import math
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.contenders import MOMENTUM, OURS, WEIGHT_DECAY, Entries
from benchmarks.report import print_rows, quartiles, write_json
from benchmarks.workload import GPT2_SMALL_LAYER, Shape, parse_shapes
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2
LEARNING_RATE = 0.02
PATIENCE = timedelta(minutes=5)  # with ranks that a failing peer has left waiting
MEASURED = "backward and step"
SETTLED = "after the step"

# ---------------------------------------------------------------- who takes part

OUR_SETTINGS: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "momentum": MOMENTUM,
    "nesterov": True,
    "weight_decay": WEIGHT_DECAY,
    "scale_mode": "original",
    "ns_coefficients": "simple",
    "ns_steps": 5,
}


@dataclass(frozen=True)
class Contender:
    """An engine under test.

    Attributes:
        name: In the table.
        coefficients: Of its rule; empty for SGD, which has none.
        settings: Settings of muonmesh on top of those that make its rule DeepSpeed's; None for DeepSpeed's optimizers.
        engine_optimizer: DeepSpeed's "optimizer" section.
    """

    name: str
    coefficients: str
    settings: dict[str, Any] | None = None
    engine_optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """What it orthogonalizes in; DeepSpeed decides by what its accelerator says."""
        if not self.coefficients:
            return ""
        if self.settings is not None:
            dtype = self.settings.get("compute_dtype", torch.bfloat16)
        else:
            muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
            dtype = muon.ns_compute_dtype(self.engine_optimizer["params"]["ns_method"])
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]

    def engine(self, model: nn.Module, config: dict[str, Any]) -> Any:
        """Make its engine."""
        if self.settings is not None:
            from muonmesh.integrations.deepspeed import initialize

            settings = {**OUR_SETTINGS, "overrides": {"weight": "muon"}, **self.settings}
            return initialize(model=model, config=config, optimizer=settings)[0]
        import deepspeed

        config = {**config, "optimizer": self.engine_optimizer, "zero_allow_untested_optimizer": True}
        return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def _deepspeed_muon(method: str) -> Contender:
    settings = {"lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "ns_method": method}
    return Contender(f"DeepSpeed {method}", "simple", engine_optimizer={"type": "Muon", "params": settings})


SGD = Contender(
    "SGD", "", engine_optimizer={"type": "SGD", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}}
)
ASKED = {
    "gram": _deepspeed_muon("gram"),
    "standard": _deepspeed_muon("standard"),
    "fp32": Contender(f"{OURS} fp32", "simple", settings={"compute_dtype": torch.float32}),
    "fp32_gram": Contender(
        f"{OURS} fp32 gram", "simple", settings={"compute_dtype": torch.float32, "ns_method": "gram"}
    ),
    "polar_express": Contender(f"{OURS} polar", "polar_express", settings={"ns_coefficients": "polar_express"}),
}


# ---------------------------------------------------------------- what is trained


class Layer(nn.Linear):
    """Its gradient is what its forward is given."""

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of weights times gradient, a scalar."""
        return (self.weight * gradient.to(self.weight.dtype)).sum()


class Model(nn.Module):
    """A stack of linear layers whose loss is linear in the weights.

    A small batch would make gradients of low rank, of which Newton–Schulz amplifies the rounding, and a large one
    would take longer than the step.
    """

    def __init__(self, shapes: Sequence[Shape], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(cols, rows, bias=False) for _ in range(layers) for rows, cols in shapes)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # so that the difference of two steps keeps all digits of an update

    def forward(self, noise: Noise, number: int, rank: int) -> Tensor:
        """The loss of a rank in a step, a scalar."""
        return torch.stack(
            [
                layer(noise.gradient(number, index, rank, (layer.out_features, layer.in_features)))
                for index, layer in enumerate(self.layers)
            ]
        ).sum()


class Noise:
    """Gradients: the same small integers times a power of two, read from somewhere else for each.

    Their mean over the ranks is exact in every dtype, whatever the order in which DeepSpeed adds.
    """

    def __init__(self, longest: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randint(-4, 5, (longest + _OFFSETS,), generator=generator).float() * 2.0**-12

    def gradient(self, number: int, index: int, rank: int, shape: Shape) -> Tensor:
        """What a rank contributes to a matrix, (rows, cols), in one step."""
        offset = ((number * 101 + index) * RANKS + rank) * _STRIDE % _OFFSETS
        return self._values[offset : offset + math.prod(shape)].view(shape)


_OFFSETS = 1 << 16
_STRIDE = 7919  # odd, so that all the offsets are visited


def exact_updates(shapes: Sequence[Shape], coefficients: Sequence[str], steps: int) -> dict[str, list[Tensor]]:
    """What the last of some steps subtracts from each matrix, decay aside, in fp64, by the name of its coefficients."""
    from tests.support.reference import muon

    from muonmesh.numerics.coefficients import coefficient_schedule

    noise = Noise(max(map(math.prod, shapes)))
    updates: dict[str, list[Tensor]] = {name: [] for name in coefficients}
    for index, shape in enumerate(shapes):
        momentum = torch.zeros(shape, dtype=torch.float64)
        for number in range(steps):
            gradients = [noise.gradient(number, index, rank, shape) for rank in range(RANKS)]
            mean = torch.stack(gradients).double().mean(dim=0)
            if number < steps - 1:
                momentum.lerp_(mean, 1 - MOMENTUM)
        for name in coefficients:
            schedule = coefficient_schedule(name, 5)
            moved, _ = muon(
                torch.zeros_like(mean),
                mean,
                {"momentum": momentum},
                lr=LEARNING_RATE,
                coefficients=schedule,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
                scale_mode="original",
            )
            updates[name].append(-moved)
    return updates


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Options:
    """What the ranks need to know; plain data, since they are started by spawning."""

    contenders: tuple[Contender, ...]
    config: dict[str, Any]
    shapes: tuple[Shape, ...]
    layers: int
    rounds: int
    warmup: int


@dataclass
class Result:
    """One engine at one stage.

    Attributes:
        name: The contender.
        dtype: What it orthogonalizes in.
        milliseconds: Backward and step, of each round, on the slowest rank.
        bytes_sent: In one backward and step, by all ranks together.
        bytes_counted: What muonmesh itself says that it has sent, all ranks; None for others.
        bytes_kept: Tensors of the engine that are alive after the step, on the rank with most.
        bytes_peak: The most during backward and step, on the rank with most.
        distances: Relative Frobenius distance of one update from the fp64 rule, of each matrix.
        problem: Why there are no figures.
    """

    name: str
    dtype: str = ""
    milliseconds: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_counted: int | None = None
    bytes_kept: int = 0
    bytes_peak: int = 0
    distances: list[float] = field(default_factory=list)
    problem: str = ""


class Sent(TorchDispatchMode):
    """Counts what collectives send, where every way to call one ends: in the operators of c10d.

    A collective of n ranks counts as an algorithm of the least traffic would send it, all n ranks together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func}: its operator of c10d would not be counted")
        if func.namespace == "c10d":
            arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
            self.bytes += self._share(func.overloadpacket.__name__, arguments)
        return func(*args, **(kwargs or {}))

    def _share(self, name: str, arguments: dict[str, Any]) -> float:
        """What this rank adds to the sum over the ranks."""
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        others, n = group.size() - 1, group.size()
        match name:
            case "allreduce_" | "allreduce_coalesced_":
                return 2 * others / n * _bytes(arguments["tensors"])
            case "reduce_" | "broadcast_":
                return others / n * _bytes(arguments["tensors"])
            case "allgather_" | "gather_":
                return (others if name == "allgather_" else others / n) * _bytes(arguments["input_tensors"])
            case "allgather_coalesced_":
                return others * _bytes(arguments["input_list"])
            case "_allgather_base_":
                return others * _bytes(arguments["input_tensor"])
            case "allgather_into_tensor_coalesced_":
                return others * _bytes(arguments["inputs"])
            case "_reduce_scatter_base_":
                return others / n * _bytes(arguments["input_tensor"])
            case "reduce_scatter_":
                return others / n * _bytes(arguments["input_tensors"])
            case "reduce_scatter_tensor_coalesced_":
                return others / n * _bytes(arguments["inputs"])
            case "alltoall_":
                return _bytes([t for rank, t in enumerate(arguments["input_tensors"]) if rank != group.rank()])
            case "alltoall_base_":
                whole, splits = _bytes(arguments["input"]), arguments["input_split_sizes"]
                share = splits[group.rank()] / (sum(splits) or 1) if splits else 1 / n
                return whole * (1 - share)
            case "send":
                return _bytes(arguments["tensors"])
            case "recv_" | "recv_any_source_" | "barrier" | "monitored_barrier_":
                return 0
        raise NotImplementedError(f"c10d::{name}: nothing is known of what it sends")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


class Arena:
    """The two ranks, their gradients, and what is asked of each engine; every rank calls everything."""

    def __init__(self, options: Options, exact: dict[str, list[Tensor]]) -> None:
        self.options = options
        self.exact = exact
        self.noise = Noise(max(map(math.prod, options.shapes)))

    def build(self, contender: Contender) -> Any:
        """A new engine."""
        return contender.engine(Model(self.options.shapes, self.options.layers), self.options.config)

    def loss(self, engine: Any, number: int) -> Tensor:
        """A rank's loss in a step, after forward."""
        loss: Tensor = engine(self.noise, number, dist.get_rank())
        return loss

    def timed(self, engine: Any, number: int) -> float:
        """Milliseconds of the slowest rank, from a barrier before backward to the end of its step."""
        loss = self.loss(engine, number)
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(loss)
        engine.step()
        return _over_ranks((time.perf_counter() - begin) * 1e3, dist.ReduceOp.MAX)

    def distances(self, engine: Any, number: int, exact: Sequence[Tensor]) -> list[float]:
        """How far one update is from the exact one, matrix by matrix."""
        before = weights(engine)
        self.timed(engine, number)
        distances = []
        for old, new, needed in zip(before, weights(engine), exact, strict=True):
            update = old.double() * (1 - LEARNING_RATE * WEIGHT_DECAY) - new.double()
            distances.append(float((update - needed).norm() / needed.norm()))
        return distances

    def sent(self, engine: Any, number: int) -> int:
        """Bytes of one backward and step."""
        loss = self.loss(engine, number)
        with Sent() as sent:
            engine.backward(loss)
            engine.step()
        return round(_over_ranks(sent.bytes, dist.ReduceOp.SUM))

    def memory(self, contender: Contender) -> tuple[int, int]:
        """Bytes of tensors that an engine keeps after its second step, and the most during that step.

        On the rank with most. As torch's allocator sees it, from before the engine is made, so state, masters,
        gradients and buffers count, whoever holds them. What operators allocate elsewhere (packed operands of a matrix
        product) does not.
        """
        # The profiler misses what a thread of gloo happens to be the last to let go; that only ever adds.
        repeats = [self._memory_once(contender) for _ in range(3)]
        lasting, peak = (_over_ranks(min(samples), dist.ReduceOp.MAX) for samples in zip(*repeats, strict=True))
        return round(lasting), round(peak)

    def _memory_once(self, contender: Contender) -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            engine = self.build(contender)
            for number in range(2):
                loss = self.loss(engine, number)
                with record_function(f"{MEASURED} {number}"):
                    engine.backward(loss)
                    engine.step()
                del loss
            gc.collect()
            with record_function(SETTLED):
                pass
        close(engine)
        events = sorted(_events(profiler), key=lambda event: event.start_time_ns)
        marks = {event.name: (event.start_time_ns, event.end_time_ns) for event in events}
        begin, end = marks[f"{MEASURED} 1"]
        alive: dict[int, int] = {}
        allocated = lasting = peak = 0
        for event in events:
            if event.name != "[memory]":
                continue
            change = event.extra_fields
            allocated -= alive.pop(change.ptr, 0)  # nothing, if it is older than this engine
            if change.alloc_size > 0:
                alive[change.ptr] = change.alloc_size
                allocated += change.alloc_size
            if event.start_time_ns <= marks[SETTLED][0]:
                lasting = allocated
            if begin <= event.start_time_ns <= end:
                peak = max(peak, allocated)
        return lasting, peak


def _events(profiler: profile) -> Iterator[Any]:
    """Yield everything that a profiler has recorded, allocations with their addresses."""
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        yield event


def _over_ranks(value: float, op: Any) -> float:
    figure = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(figure, op=op)
    return figure.item()


def weights(engine: Any) -> list[Tensor]:
    """The fp32 weights, whole, in the order of the model."""
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {}
    if hasattr(engine.optimizer, "fp32_groups"):  # stage 0 in bf16
        for halves, others in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            masters |= {id(parameter): master for parameter, master in zip(halves, others, strict=True)}
    tensors = []
    for parameter in engine.module.parameters():
        master = masters.get(id(parameter))
        whole = safe_get_full_fp32_param(parameter) if master is None else master
        tensors.append((parameter if whole is None else whole).detach().float().clone())
    return tensors


def close(engine: Any) -> None:
    engine.destroy()
    gc.collect()


def contest(arena: Arena) -> list[Result]:
    """Measure everybody; one of DeepSpeed's that fails has that as its result, ours raises."""
    options = arena.options
    results = {contender.name: Result(contender.name, contender.dtype) for contender in options.contenders}
    engines: dict[str, Any] = {}

    def attempt(contender: Contender, action: Callable[[], Any]) -> Any:
        """Run it, unless the contender has failed before."""
        result = results[contender.name]
        if result.problem:
            return None
        problem, value = "", None
        try:
            value = action()
        except Exception as error:
            if contender.settings is not None or contender is SGD:
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        problems = [""] * RANKS
        dist.all_gather_object(problems, problem)
        result.problem = problem or max(problems)
        return value

    def warm(contender: Contender) -> None:
        engines[contender.name] = arena.build(contender)
        for number in range(options.warmup):
            arena.timed(engines[contender.name], number)

    for contender in options.contenders:
        attempt(contender, lambda contender=contender: warm(contender))
    able = [contender for contender in options.contenders if not results[contender.name].problem]
    for number in range(options.rounds):
        for contender in able:
            took = arena.timed(engines[contender.name], options.warmup + number)
            results[contender.name].milliseconds.append(took)
    last = options.warmup + options.rounds
    for contender in able:
        result, engine = results[contender.name], engines.pop(contender.name)
        if contender.coefficients:
            result.distances = arena.distances(engine, last, arena.exact[contender.coefficients])
        result.bytes_sent = arena.sent(engine, last + 1)
        if contender.settings is not None:
            counted = sum(muon.counts.bytes_sent for muon in engine.basic_optimizer.muons)
            result.bytes_counted = round(_over_ranks(counted, dist.ReduceOp.SUM))
        close(engine)
        del engine
    for contender in able:
        result = results[contender.name]
        result.bytes_kept, result.bytes_peak = arena.memory(contender)
    return list(results.values())


def _rank(rank: int, folder: str, options: Options) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))  # as launchers do
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Collectives are gloo's: DeepSpeed would compile an extension for shared memory, which only inference uses.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed and inductor call torch's functions by old names
    gc.freeze()  # every engine looks for cycles in all that is imported, whoever steps
    # Both methods of DeepSpeed's Muon share compiled functions here; neither may use up the other's recompilations.
    torch._dynamo.config.recompile_limit = 64
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS, timeout=PATIENCE)
    results = contest(Arena(options, torch.load(Path(folder) / "exact", mmap=True)))
    if rank == 0:
        (Path(folder) / "results").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- what is told


@dataclass(frozen=True)
class Added:
    """What a contender adds to the engine with SGD.

    Attributes:
        ms_added: Quartiles over the rounds of its time minus SGD's in the same round.
        ratio: Of the medians of that time, to ours.
        ratio_in_dtype: To ours in the same dtype, if that took part.
        ratio_in_all: Of the medians of the whole time, SGD's not subtracted, to ours.
        sent_added: Bytes sent minus SGD's; so are the following.
        kept_added: Bytes that stay.
        peak_added: The most bytes.
    """

    ms_added: tuple[float, float, float]
    ratio: float
    ratio_in_dtype: float | None
    ratio_in_all: float
    sent_added: int
    kept_added: int
    peak_added: int


def added(results: Sequence[Result]) -> dict[str, Added]:
    """What each adds, by name."""
    named = {result.name: result for result in results}
    sgd = named[SGD.name]

    def quarters(result: Result) -> tuple[float, float, float]:
        rounds = zip(result.milliseconds, sgd.milliseconds, strict=True)
        return quartiles([seconds - without for seconds, without in rounds])

    def alike(result: Result) -> Result | None:
        """Ours with the same rule and dtype."""
        return next((r for r in results if r.name in (OURS, f"{OURS} fp32") and r.dtype == result.dtype), None)

    figures = {}
    for result in results:
        if result.name == sgd.name or result.problem:
            continue
        times, same = quarters(result), alike(result)
        figures[result.name] = Added(
            times,
            times[1] / quarters(named[OURS])[1],
            times[1] / quarters(same)[1] if same else None,
            statistics.median(result.milliseconds) / statistics.median(named[OURS].milliseconds),
            result.bytes_sent - sgd.bytes_sent,
            result.bytes_kept - sgd.bytes_kept,
            result.bytes_peak - sgd.bytes_peak,
        )
    return figures


def print_stage(title: str, results: Sequence[Result]) -> None:
    """Print one stage: time, then the rest; what is SGD's is in brackets."""
    rows = added(results)
    times, rest = [], []
    for result in (result for result in results if not result.problem):
        whole = f"{statistics.median(result.milliseconds):.0f}"
        sizes = (result.bytes_sent, result.bytes_kept, result.bytes_peak)
        if result.name not in rows:
            times.append([result.name, "", "", "", "", f"({whole})"])
            rest.append([result.name, "", *(f"({size / 1e6:.2f})" for size in sizes), ""])
            continue
        row = rows[result.name]
        low, middle, high = row.ms_added
        in_dtype = "" if row.ratio_in_dtype is None else f"{row.ratio_in_dtype:.2f}"
        times.append([result.name, f"{row.ratio:.2f}", in_dtype, f"{middle:.0f}", f"{low:.0f} – {high:.0f}", whole])
        more = (row.sent_added, row.kept_added, row.peak_added)
        far = f"{max(result.distances):.1e}"
        rest.append([result.name, result.dtype, *(f"{size / 1e6:.2f}" for size in more), far])
    heads = ["", "ratio", "in dtype", "ms added", "middle half", "ms in all"]
    print_rows(f"{title}: backward and step (ratio: of ms added to SGD's)", heads, times)
    print_rows(f"{title}: added to SGD's", ["", "dtype", "MB sent", "MB kept", "MB peak", "distance"], rest)
    for result in results:
        if result.problem:
            print(f"{result.name}: {result.problem}")


def config_of(stage: int, *, reduce_scatter: bool, bf16: bool, offload: bool, elements: int) -> dict[str, Any]:
    """The config that all share."""
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        # DeepSpeed's 500 million elements, without the memory: one bucket holds everything.
        zero |= {"reduce_scatter": reduce_scatter, "reduce_bucket_size": elements}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}}
    return {
        "zero_force_ds_cpu_optimizer": False,  # an offloaded optimizer may be another than DeepSpeed's Adam
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # 1.0 unless it is written, by which DeepSpeed's Muon would scale its whole update
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }


def measure(options: Options, exact: dict[str, list[Tensor]]) -> list[Result]:
    """Start the ranks, run the contest there, and return rank 0's results."""
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")  # read when the ranks import
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", KINETO_LOG_LEVEL="99")  # the profiler would say that it runs
    with tempfile.TemporaryDirectory() as folder:
        torch.save(exact, Path(folder) / "exact")
        spawn(_rank, args=(folder, options), nprocs=RANKS)  # type: ignore[no-untyped-call]
        results: list[Result] = pickle.loads((Path(folder) / "results").read_bytes())
    return results


def main() -> None:
    """Measure, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[1, 2, 3, 0], metavar="STAGE")
    parser.add_argument(
        "--contenders", nargs="*", choices=list(ASKED), default=list(ASKED), help="besides ours; default: all"
    )
    parser.add_argument(
        "--shapes", type=parse_shapes, default=GPT2_SMALL_LAYER, help="matrices of a layer, such as 768x3072,768x768"
    )
    parser.add_argument("--layers", type=int, default=3, help="how many such layers (default 3)")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds (default 10)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default 3)")
    parser.add_argument("--bf16", action="store_true", help="bf16 weights and gradients (default fp32)")
    parser.add_argument("--offload", action="store_true", help="optimizer state in CPU memory (ZeRO-Offload)")
    parser.add_argument(
        "--reduce-scatter",
        action=argparse.BooleanOptionalAction,
        help="for all; default: at stages 1 and 2, since DeepSpeed's Muon refuses it at 3",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    chosen = parser.parse_args()
    if min(chosen.rounds, chosen.warmup, chosen.layers) < 1:
        parser.error("--rounds, --warmup, --layers: needed at least 1")
    contenders = (SGD, Contender(OURS, "simple", settings={}), *(ASKED[name] for name in chosen.contenders))
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"The machine is busy (load {load:.1f}): the ratios may hold, the milliseconds do not.")
    rules = sorted({contender.coefficients for contender in contenders} - {""})
    exact = exact_updates(chosen.shapes * chosen.layers, rules, chosen.warmup + chosen.rounds + 1)
    tables = {}
    for stage in chosen.stages:
        scatters = stage < 3 if chosen.reduce_scatter is None else chosen.reduce_scatter
        elements = chosen.layers * sum(map(math.prod, chosen.shapes))
        config = config_of(stage, reduce_scatter=scatters, bf16=chosen.bf16, offload=chosen.offload, elements=elements)
        options = Options(contenders, config, chosen.shapes, chosen.layers, chosen.rounds, chosen.warmup)
        results = measure(options, exact)
        title = f"Stage {stage}, {'bf16' if chosen.bf16 else 'fp32'} weights{', offload' if chosen.offload else ''}"
        print_stage(title, results)
        figures_by_name = added(results)
        tables[f"stage {stage}"] = {
            "title": title,
            "config": config,
            "contenders": {
                r.name: asdict(r) | (asdict(figures_by_name[r.name]) if r.name in figures_by_name else {})
                for r in results
            },
        }
    if chosen.json:
        facts = {
            "load_before": round(load, 2),
            "deepspeed": importlib.metadata.version("deepspeed"),
            "ranks": RANKS,
            "shapes": [f"{rows}x{cols}" for rows, cols in chosen.shapes],
            "layers": chosen.layers,
        }
        write_json(chosen.json, "benchmarks/deepspeed_step.py", Entries((), (), {}), tables, facts)


if __name__ == "__main__":
    main()
