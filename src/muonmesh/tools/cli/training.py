"""Training: the work of one rank, from joining the process group to the end of its last training."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.checkpoint.save_load import reshard
from muonmesh.comm.gather_objects import first_difference, gather_objects, on_first_rank
from muonmesh.comm.storage import local_of
from muonmesh.errors import FileError, explain_error
from muonmesh.files import write_text
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.tools.cli.checkpoints import Checkpoints, checkpoints_of
from muonmesh.tools.cli.corpus import Corpus, Windows, load_corpus_of
from muonmesh.tools.cli.model import build_model, model_config, parallelise
from muonmesh.tools.cli.report import TIMES, append_metrics, cut_metrics
from muonmesh.tools.cli.run_files import LAUNCHER, locked
from muonmesh.tools.cli.run_settings import REPLICAS, Optimizer, ScheduleName, Settings, load_settings, option
from muonmesh.tools.cli.terminal import say, shell_line

LONGEST_SILENCE = 10.0  # seconds between two lines of progress
SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 64, 0.8  # of the text that a trained model writes

WSD_DECAY_SHARE = 0.2  # warmup-stable-decay (arXiv 2404.06395): the last fifth goes down to zero


def learning_rate_factor(step: int, *, name: ScheduleName, steps: int, warmup: int) -> float:
    """Return the learning rate at ``step`` (1-based) of ``steps``, as a share of its peak.

    The rate rises linearly in the first ``warmup`` steps. Then ``cosine`` and ``linear`` fall to zero, ``wsd`` is
    constant and falls to zero in the last fifth, and ``constant`` stays. The last step has a rate above zero; the step
    after it would have zero.
    """
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / (steps - warmup)  # 0 at the first step after warmup, below 1 at the last
    match name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return 1.0 - progress
        case "wsd":
            return min(1.0, (1.0 - progress) / WSD_DECAY_SHARE)
        case "constant":
            return 1.0


class StopRequest:
    """A request to stop, set by SIGINT or SIGHUP on any rank; the training ends after the step that exchanges it."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Install the handlers of SIGINT and SIGHUP; an ignored SIGHUP, as under nohup, stays ignored.

        SIGTERM still ends the process, so that a rank that waits for a dead rank ends at once.
        """
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def groups_of(name: Optimizer, model: nn.Module) -> mm.ParamGroups:
    """Return the groups of a model that is not sharded yet, read from one forward."""
    overrides = None if name == "muon" else {".*": "adamw"}
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="cpu")
    return mm.split_params(model, overrides=overrides, example=(tokens,), watch=False)


def optimizers_of(name: Optimizer, groups: mm.ParamGroups, settings: Settings) -> tuple[torch.optim.Optimizer, mm.Muon]:
    """Return the optimizer that steps, and the one that `muonmesh.checkpoint` saves. With Muon they are the same.

    The AdamW training steps with `torch.optim.AdamW`. It shares its state with a `muonmesh.Muon` that has only AdamW
    groups. Both trainings use the same groups (`muonmesh.split_params`) and weight decay; neither decays vectors.
    """
    saved = mm.Muon(
        groups,
        process_group="world" if settings.parallel == "ddp" else None,
        lr=settings.lr_of(name),
        weight_decay=settings.weight_decay,
    )
    if name == "muon":
        return saved, saved
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in saved.param_groups]
    base = saved.defaults
    adamw = torch.optim.AdamW(plain, lr=base["lr"], betas=base["adamw_betas"], eps=base["adamw_eps"], fused=True)
    adamw.state = saved.state
    return adamw, saved


class Training:
    """One training: a model, its optimizer, data and checkpoints.

    The learning rate, the sequences and the random numbers are functions of the seed and the step. So two trainings
    with different optimizers start from the same weights and read the same data, and a resumed training continues as if
    it had never stopped.
    """

    def __init__(self, name: Optimizer, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        self.name, self.settings, self.device = name, settings, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        model = build_model(model_config(settings.model, vocab=corpus.vocab, seq=settings.seq))
        groups = groups_of(name, model)
        self.model = parallelise(model, parallel=settings.parallel, dtype=settings.dtype, device=device)
        self.optimizer, self.saved = optimizers_of(name, groups.held_by(self.model), settings)
        self.peak_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.train_windows = Windows(corpus.train(), length=settings.seq, seed=settings.seed)
        validation = Windows(corpus.validation(), length=settings.seq, seed=settings.seed)
        self.validation_windows = validation.spread(min(settings.eval_sequences, validation.count))
        self.checkpoints = Checkpoints(checkpoints_of(settings.directory, name))
        self.start = 0
        self.printed, self.validated = time.monotonic(), ""  # of the progress
        self.tokenizer = corpus.tokenizer()
        self.unwritten: FileError | None = None  # the metrics that only rank 0 writes
        self.seconds = 0.0  # without evaluation and checkpoints; only rank 0 has the seconds before a resume
        if isinstance(self.model, DistributedDataParallel):
            self._settle_buckets()

    def restore(self) -> None:
        """Load the latest checkpoint, if there is one.

        Raises:
            FileError, StateError: on all ranks: the checkpoint is damaged or does not fit; no weight has changed.
        """
        step = self.checkpoints.latest()
        if step is not None:
            if step > self.settings.steps:
                fault, needed = f"a checkpoint of step {step}", f"none above step {self.settings.steps}, the last one"
                write = "Move the checkpoint away"
                raise FileError(explain_error(str(self.checkpoints.directory), fault, needed, write))
            self.checkpoints.load(step, self.model, self.saved)
            self.start = step

    def run(self, stop: StopRequest) -> bool:
        """Train to the end, or until a rank has a request to stop. Both end with a checkpoint.

        Each step reduces a flag over all ranks, so that all ranks stop after the same step.

        Returns:
            True if the last step is done, False if the training was stopped earlier.

        Raises:
            FileError: on all ranks: a loss or the state is not finite, or a file cannot be written. The last checkpoint
                is unchanged.
        """
        settings = self.settings
        if self.start == 0:
            self._validate(0)
        for step in range(self.start + 1, settings.steps + 1):
            stopping = self._step(step, stop)
            if step % settings.eval_every == 0 or step == settings.steps:
                self._validate(step)
            every = settings.checkpoint_every
            if stopping or step == settings.steps or (every and step % every == 0):
                on_first_rank(self._need_written)
                self.checkpoints.save(step, self.model, self.saved)
            if stopping:
                return step == settings.steps
        return True

    def evaluate(self) -> float:
        """Return the mean loss over the held-out sequences, the same in every call. The ranks share the sequences."""
        size = self.settings.micro_batch
        windows = self.validation_windows[self.rank :: self.world]
        most = -(-len(self.validation_windows) // self.world)  # FSDP2 needs equally many forwards on all ranks
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._evaluating() as inner:
            for first in range(0, most, size):
                batch = windows[first : first + size]
                loss = self._loss(inner, batch if len(batch) else self.validation_windows[:1])
                total += loss.double() * len(batch)
        dist.all_reduce(total)
        return float(total) / len(self.validation_windows)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[nn.Module]:
        """Return a context that yields the model without dropout and gradients. All ranks enter it."""
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        inner.eval()
        with torch.no_grad():
            yield inner
        inner.train()
        reshard(inner)  # without a backward pass, the root stays gathered; a checkpoint needs shards

    def sample(self) -> str:
        """Return a beginning from the held-out text, and what the model writes after it. All ranks call it."""
        tokens = self.validation_windows[0, : max(1, self.settings.seq // 4)].tolist()
        draws = np.random.default_rng(self.settings.seed)
        with self._evaluating() as inner:
            for _ in range(SAMPLE_TOKENS):
                read = torch.tensor([tokens[-self.settings.seq :]], dtype=torch.int64, device=self.device)
                logits = inner(input_ids=read, use_cache=False).logits[0, -1].double().cpu().numpy()
                tokens.append(int(np.argmax(logits / SAMPLE_TEMPERATURE + draws.gumbel(size=logits.shape))))
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _step(self, step: int, stop: StopRequest) -> bool:
        """Take a step, write its metrics, and return whether any rank has a request to stop."""
        settings = self.settings
        factor = learning_rate_factor(step, name=settings.schedule, steps=settings.steps, warmup=settings.warmup)
        groups = zip(self.optimizer.param_groups, self.saved.param_groups, self.peak_lrs, strict=True)
        for group, same, peak in groups:
            group["lr"] = same["lr"] = peak * factor
        seed = np.random.SeedSequence([settings.seed, step, self.rank]).generate_state(1)[0]
        torch.manual_seed(int(seed))  # dropout, the same whether or not the run was interrupted

        began = self._synchronized_time()
        loss = self._accumulate(step)
        computed = self._synchronized_time()
        squares = self._gradient_squares()
        begun = self._synchronized_time()
        self._update()
        updated = self._synchronized_time()
        flags = (torch.full_like(loss, float(flag)) for flag in (stop.requested, self.unwritten is not None))
        status = torch.stack([loss / self.world, squares, *flags])
        dist.all_reduce(status)
        mean, squared, stop_flags, unwritten = status.tolist()
        if unwritten:
            on_first_rank(self._need_written)
        self._need_finite("loss", step, mean)
        seconds = self._synchronized_time() - began
        self.seconds += seconds
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        norm = math.sqrt(squared) if math.isfinite(squared) else None
        times = dict(zip(TIMES, (seconds, computed - began, updated - begun), strict=True))
        self._append(step, loss=mean, lr=lr, gradient_norm=norm, **times)
        monotonic = time.monotonic()
        if self.rank == 0 and (step == settings.steps or monotonic - self.printed >= LONGEST_SILENCE):
            self.printed = monotonic
            progress = f"lr {lr:.2g}, gradient norm {squared**0.5:.2g}, {settings.tokens_per_step / seconds:,.0f} tok/s"
            say(f"{self.name:>5} {step}/{settings.steps} loss {mean:.3f}{self.validated}, {progress}")
        return bool(stop_flags > 0)

    def _synchronized_time(self) -> float:
        """Wait until the device has finished its work, and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _accumulate(self, step: int) -> Tensor:
        """Run forward and backward over this rank's sequences of a step; return their mean loss, 0-d fp64."""
        settings = self.settings
        self.optimizer.zero_grad()  # here and not after the update, since `metrics` reads the gradients
        first = (step - 1) * settings.batch
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in range(settings.grad_accum):
            self._reduce_gradients(micro == settings.grad_accum - 1)
            begin = first + (micro * self.world + self.rank) * settings.micro_batch
            windows = self.train_windows.shuffled(range(begin, begin + settings.micro_batch))
            loss = self._loss(self.model, windows)
            (loss / settings.grad_accum).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / settings.grad_accum
        return total

    def _reduce_gradients(self, reduces: bool) -> None:
        """Choose whether the next forward and backward pass reduces gradients, or adds them up on each rank."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(reduces)
        elif isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = reduces  # what its no_sync() sets

    def _gradient_squares(self) -> Tensor:
        """Return the share of this rank in the squared norm of the gradients, before they are clipped; 0-d fp64."""
        copies = {"ddp": self.world, "hsdp": REPLICAS, "fsdp": 1}[self.settings.parallel]
        gradients = [local_of(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        return sums_of_squares(gradients).sum() / copies

    def _update(self) -> None:
        """Clip and step. `muonmesh.Muon` clips only AdamW's gradients, since the size of Muon's update is fixed."""
        if self.settings.clip and isinstance(self.optimizer, mm.Muon):
            self.optimizer.clip_grad_norm_(self.settings.clip, norms=False)
        elif self.settings.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()

    def explain(self) -> str:
        """Return the explanation of the optimizer's plan, as text."""
        kind = "" if self.optimizer is self.saved else "torch.optim.AdamW, by these groups\n\n"
        return f"{kind}{self.saved.explain()}"

    def _loss(self, model: nn.Module, windows: np.ndarray) -> Tensor:
        """Return the mean cross entropy in nats per token, 0-d fp32, of windows (n, seq + 1)."""
        tokens = torch.from_numpy(windows).to(self.device, non_blocking=True)
        autocast = self.settings.dtype == "bf16" and self.settings.parallel == "ddp"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _validate(self, step: int) -> None:
        loss = self.evaluate()
        self._need_finite("validation loss", step, loss)
        figures = self.optimizer.metrics() if step and isinstance(self.optimizer, mm.Muon) else {}
        figures |= {f"{group['name']}/lr": group["lr"] for group in self.optimizer.param_groups if figures}
        details = {key: float(value) if math.isfinite(value) else None for key, value in figures.items()}
        self._append(step, validation_loss=loss, **({"optimizer": details} if details else {}))
        self.validated = f", validation {loss:.3f}"

    def _append(self, step: int, **figures: Any) -> None:
        if self.rank == 0 and self.unwritten is None:
            tokens = step * self.settings.tokens_per_step
            directory = self.settings.directory
            try:
                append_metrics(directory, run=self.name, step=step, tokens=tokens, seconds=self.seconds, **figures)
            except FileError as error:
                self.unwritten = error  # the other ranks wait in a collective, so all of them raise it at the next

    def _need_written(self) -> None:
        """Raise the error of the metrics that could not be written, if there is one."""
        if self.unwritten is not None:
            raise self.unwritten

    def _need_finite(self, measured: str, step: int, loss: float) -> None:
        """Raise FileError unless a mean loss is finite. It is a mean over all ranks, so all ranks raise together."""
        if math.isfinite(loss):
            return
        settings, last = self.settings, self.checkpoints.newest
        assurance = "There is no checkpoint yet" if last is None else f"The checkpoint of step {last} is kept"
        rate = option("lr" if self.name == "muon" else "adamw_lr")
        raise FileError(
            f"{self.name}: the {measured} of step {step} is {loss}; needed a finite one. {assurance}. Start a new run "
            f"with a lower {rate} (this one's is {settings.lr_of(self.name):g})"
        )

    def _settle_buckets(self) -> None:
        """Make DDP rearrange its buckets before the first step, by two passes whose gradients are dropped.

        DDP rearranges its buckets once, after the first backward pass, in the order in which gradients became ready.
        Sums over three or more ranks round differently in other buckets. Without this method, the first step of a
        resumed run would use the initial buckets, while the uninterrupted run uses rearranged buckets.
        """
        for _ in range(2):
            self._loss(self.model, self.train_windows.shuffled(range(1))).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()


def work(run: Path) -> None:
    """Run all trainings of a run's settings, from their checkpoints if there are any.

    Raises:
        FileError: ranks have different texts or settings, the number of ranks differs from the run's, another process
            trains in this directory, or files of the run are damaged.
    """
    settings = load_settings(run)
    corpus = load_corpus_of(run)
    device = join(settings.device, timeout=timedelta(seconds=settings.timeout) if settings.timeout else None)
    if dist.get_world_size() != settings.ranks:
        raise FileError(
            f"{run}: found --nproc-per-node {dist.get_world_size()}; needed the {settings.ranks} of the run. "
            f"Write: --nproc-per-node {settings.ranks}, or change them: "
            f"{shell_line('train', '--resume', run)} --ranks N"
        )
    lock = contextlib.ExitStack()
    if LAUNCHER not in os.environ:  # the launcher holds the lock already
        on_first_rank(lambda: lock.enter_context(locked(run, option="torchrun")))
    require_equal_values(run, {**asdict(settings), "text": corpus.digest, "vocabulary": corpus.vocab})
    settings = replace(settings, out=str(run))  # the directory may have moved
    stop = StopRequest()
    for name in settings.optimizers:
        if not train(name, settings, corpus, device, stop):
            break
        gc.collect()  # sharded models have many reference cycles, and the next model needs the memory
    dist.destroy_process_group()
    lock.close()


def require_equal_values(run: Path, own_values: Mapping[str, Any]) -> None:
    """Check that all ranks have the same values. Called on all ranks.

    Raises:
        FileError: on every rank: values differ; the message names the first.
    """
    everyone = gather_objects(own_values)
    if (clash := first_difference(everyone)) is not None:
        values = ", ".join(repr(other.get(clash[0])) for other in everyone)
        raise FileError(f"{run}: the ranks were given different {clash[0]}: {values}; needed the same on each of them")


def join(kind: str, *, timeout: timedelta | None = None) -> torch.device:
    """Make the default process group of ranks that torchrun or `launch` has started; return the device.

    torchrun gives all attempts of a run the same store. There, a restarted attempt would find the addresses of ended
    processes, and gloo would wait for them. So on one machine, each attempt has its own prefix in the store. On several
    machines, torchrun's agents count attempts differently, so torchrun must not share its store: see docs/training.md.

    Args:
        kind: ``"cpu"``, over gloo, or ``"cuda"``, over NCCL.
        timeout: The longest time that a collective waits; None means torch's default.
    """
    settings: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        settings |= {"backend": "nccl", "device_id": device}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store, rank, ranks = next(rendezvous("env://"))
        attempt = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        settings |= {"store": attempt, "rank": rank, "world_size": ranks}
    dist.init_process_group(**settings)
    return device


def train(name: Optimizer, settings: Settings, corpus: Corpus, device: torch.device, stop: StopRequest) -> bool:
    """Run one training, from its checkpoint if it has one; return False if it was stopped."""
    run = settings.directory
    training = Training(name, settings, corpus, device)
    training.restore()
    explanation = training.explain()

    def write() -> None:
        training.seconds = cut_metrics(run, name, training.start if training.start else -1)
        write_text(run / f"explain-{name}.txt", f"{explanation}\n")

    # All ranks meet here. Ctrl-C must not kill one rank while another already takes it as a request to stop.
    on_first_rank(write)
    stop.install()
    finished = training.run(stop)
    if finished:
        sample = training.sample()
        on_first_rank(lambda: write_text(run / f"sample-{name}.txt", f"{sample}\n"))
    return finished
