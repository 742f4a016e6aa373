"""Hosts on a GPU: DeepSpeed, Megatron-Core and FSDP2 with one rank, loss scales, fast attention, a compiled model.

Every function runs on a CPU too, in `make soak`: only the device differs, gloo stands for NCCL, and what a CPU lacks is
left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import muonmesh as mm
from tests.gpu import pytestmark as gpu
from tests.gpu.rank import one_rank
from tests.support import problem

DEVICES = [pytest.param("cuda", marks=gpu), pytest.param("cpu", marks=pytest.mark.soak)]
on_devices = pytest.mark.parametrize("device", DEVICES)

# ---------------------------------------------------------------- frameworks, one rank each


ENGINE = ("exact in fp32", "exact in bf16", "clipped", "its checkpoint", "our checkpoint")


@on_devices
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", ENGINE)
def test_deepspeed(device: str, stage: int, case: str) -> None:
    """Bit for bit: the gradients are known exactly, in bf16 too, and so are the sums of their squares."""
    pytest.importorskip("deepspeed")
    assert one_rank("tests.gpu.hosts:deepspeed_engine", device)[f"{stage} {case}"] == []


MEGATRON = (
    "DDP, fp32",
    "DDP, bf16",
    "distributed optimizer, bf16",
    "distributed optimizer, bf16, overlapping",
    "distributed optimizer, fp16",
)


@on_devices
@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(device: str, case: str) -> None:
    """Bit for bit, beside one process that is given the gradients that Megatron has reduced."""
    pytest.importorskip("megatron.core")
    trained = one_rank("tests.gpu.hosts:megatron", device)[case]
    assert isinstance(trained, dict), trained
    assert trained["differing"] == {}
    assert trained["moved"] > 0.01
    assert trained["norms"] == pytest.approx(trained["expected"], rel=1e-6)


@on_devices
def test_fsdp2_has_the_bits_of_one_process(device: str) -> None:
    """One rank holds whole parameters, so that the same kernels get the same input."""
    pytest.importorskip("transformers")
    outcome = one_rank("tests.gpu.hosts:fsdp2", device)
    assert all(math.isfinite(loss) for loss in outcome["losses"])
    assert outcome["still"] == []
    assert outcome["one process"] == {}


@on_devices
def test_fsdp2_resumes_from_a_checkpoint(device: str) -> None:
    pytest.importorskip("transformers")
    outcome = one_rank("tests.gpu.hosts:fsdp2", device)
    assert outcome["loss again"] == pytest.approx(outcome["losses"][2], rel=1e-3)
    assert outcome["resumed"] == {}


# ---------------------------------------------------------------- loops of one process


def network(device: str, *, width: int = 64, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A network whose backward pass sums in one order."""
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 8)).to(device, dtype)


def batch_on_device(step: int, device: str, width: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(32, width, generator=generator), torch.randint(8, (32,), generator=generator)
    return drawn[0].to(device), drawn[1].to(device)


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """The host waits for nothing that the device does, or it is an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@on_devices
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])
def test_a_loss_scale_that_overflows(device: str, clip: bool) -> None:
    """The second step and a later one overflow in fp16; from the fourth on nothing waits for the device."""
    model = network(device)
    optimizer = mm.from_model(model, lr=0.02)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=1000)
    for step, overflows in enumerate([False, True, False, True, False, False]):
        x, y = batch_on_device(step, device)
        with torch.autocast(device, torch.float16):
            loss = functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss * (1e6 if overflows else 1.0)).backward()
        gradients = [p.grad for p in model.parameters()]
        before = problem.result(model, optimizer)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        scale = scaler.get_scale()
        with no_waiting(device) if step > 2 else contextlib.nullcontext():
            if clip:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer, scaler=scaler)
            scaler.update()
        optimizer.zero_grad()
        after = problem.result(model, optimizer)
        assert finite == (not overflows), step
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
        if overflows:
            assert problem.differing(before, after) == []
        else:
            assert [name for name, _ in model.named_parameters() if torch.equal(before[name], after[name])] == [], step


@on_devices
def test_a_compiled_model_under_autocast(device: str) -> None:
    """The optimizer's step is outside of what is compiled."""
    import torch._inductor.config as inductor

    model = network(device)
    optimizer = mm.from_model(model, lr=0.01)
    with inductor.patch(compile_threads=1):  # in this process, which leaves none behind
        compiled = torch.compile(model)
        losses = []
        for _ in range(5):
            x, y = batch_on_device(0, device)
            with torch.autocast(device, torch.bfloat16):
                loss = functional.cross_entropy(compiled(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    torch._dynamo.reset()
    assert losses[-1] < losses[0] - 0.1


DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16 with masters": {"dtype": torch.bfloat16, "master_dtype": torch.float32},
}


def trained_on_device(device: str, dtype: torch.dtype, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Six steps whose backward passes run while state is still on its way; losses, weights and state."""
    width = 1024 if device == "cuda" else 64
    model = network(device, width=width, layers=4, dtype=dtype)
    optimizer = mm.from_model(model, lr=0.01, memory_budget_mb=16 if device == "cuda" else 0.05, **settings)
    batches = [batch_on_device(step, device, width) for step in range(6)]
    losses = []
    for x, y in batches:
        loss = functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()  # its memory is the next pass's
        losses.append(loss.detach())
    optimizer.finish()
    return [float(loss) for loss in losses], problem.result(model, optimizer)


@on_devices
@pytest.mark.parametrize("name", DTYPES)
def test_state_on_the_host_in_a_training_loop(device: str, name: str) -> None:
    plain, again = trained_on_device(device, **DTYPES[name]), trained_on_device(device, **DTYPES[name])
    assert problem.differing(plain[1], again[1]) == [], "the backward pass itself has other bits at every run"
    with_state_on_host = trained_on_device(device, **DTYPES[name], state_device="cpu")
    assert with_state_on_host[0] == plain[0]
    assert problem.differing(with_state_on_host[1], plain[1]) == []


# ---------------------------------------------------------------- QK-clip

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HEADS, SIZE = 4, 64


class Attention(nn.Module):
    """Causal attention that keeps what it multiplied.

    Args:
        dtype: Of weights and of what the kernel gets.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(96, HEADS * SIZE))
        with torch.no_grad():  # heads whose logits are small, of the size of a threshold, and large
            for module in (self.q_proj, self.k_proj):
                sizes = torch.tensor([0.5, 2.0, 4.0, 8.0]).repeat_interleave(SIZE)
                module.weight.mul_(sizes[:, None])
        self.to(device, dtype)

    def forward(self, x: Tensor, clip: mm.QKClip, backend: SDPBackend | None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        self.queries_and_keys = q.detach().double(), k.detach().double()
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend), clip.watching(self):
            result: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return result

    def largest(self) -> Tensor:
        """The largest logit of each head, in fp64."""
        q, k = self.queries_and_keys
        logits = q @ k.mT / math.sqrt(SIZE)
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return logits.masked_fill(later, -torch.inf).amax((0, 2, 3))


# A CPU has one kernel, which it chooses itself. 100 keys are no multiple of what kernels pad to.
QK = [
    *(pytest.param("cuda", name, dtype, marks=gpu) for name in BACKENDS for dtype in (torch.bfloat16, torch.float16)),
    pytest.param("cuda", "efficient", torch.float32, marks=gpu),
    pytest.param("cpu", None, torch.bfloat16, marks=pytest.mark.soak),
    pytest.param("cpu", None, torch.float32, marks=pytest.mark.soak),
]


@pytest.mark.parametrize("keys", [100, 256])
@pytest.mark.parametrize(("device", "backend", "dtype"), QK)
def test_the_log_sum_exp_of_fast_kernels_bounds_the_logits(
    device: str, backend: str | None, dtype: torch.dtype, keys: int
) -> None:
    """And the weights are clipped by it: no logit is above the threshold afterwards."""
    torch.manual_seed(0)
    module = Attention(device, dtype)
    optimizer = mm.from_model(module, lr=0.0, master_dtype=torch.float32 if dtype != torch.float32 else None)
    clip = mm.QKClip(module, threshold=20.0, optimizer=optimizer)
    x = torch.randn(3, keys, 96, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    chosen = None if backend is None else BACKENDS[backend]
    try:
        module(x, clip, chosen).float().square().mean().backward()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            pytest.skip(f"this device has no such kernel: {error}")
        raise
    exact = module.largest()
    optimizer.step()
    (bound,) = clip.largest.values()
    bound, slack = bound.double(), 1e-4 * (1 + exact.abs())  # kernels compute logits in fp32
    assert bool((bound >= exact - slack).all()), (bound, exact)
    assert bool((bound <= exact + math.log(keys) + slack).all()), (bound, exact)
    assert int((bound > 20).sum()) in range(1, HEADS)
    module(x, clip, chosen)
    assert bool((module.largest() <= 20 * 1.02).all())  # queries and keys are rounded to bf16 again


@on_devices
def test_qk_clip_of_transformers_on_its_default_attention(device: str) -> None:
    pytest.importorskip("transformers")
    from tests.gpu.hosts import llama, tokens

    logits, explained = {}, {}
    for attention in ("sdpa", "eager"):
        model = llama(device).train()
        model.set_attn_implementation(attention)  # type: ignore[operator]
        optimizer = mm.from_model(model, lr=0.0)
        clip = mm.QKClip(model, threshold=1e6, optimizer=optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(20.0 if "q_proj" in name or "k_proj" in name else 1.0)
        batch = tokens(0, device)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        logits[attention] = torch.stack(list(clip.largest.values())).double()
        explained[attention] = clip.explain()
    assert explained["sdpa"].count("bound, the kernel's log-sum-exp") == 2, explained["sdpa"]
    assert "exact" in explained["eager"]
    slack = 1e-3 * (1 + logits["eager"].abs())
    assert bool((logits["sdpa"] >= logits["eager"] - slack).all()), logits
    assert bool((logits["sdpa"] <= logits["eager"] + math.log(32) + slack).all()), logits


@on_devices
def test_qk_clip_scales_master_weights_in_cpu_memory(device: str) -> None:
    """Factors are on the device of the logits; the step may still copy masters to the CPU when the clip begins."""
    torch.manual_seed(0)
    module = Attention(device, torch.bfloat16)
    optimizer = mm.from_model(module, lr=0.0, master_dtype=torch.float32, state_device="cpu")
    clip = mm.QKClip(module, threshold=20.0, optimizer=optimizer)
    largest = torch.tensor([10.0, 20.0, 45.0, 80.0], device=device)
    factors = (20 / largest.double().cpu()).clamp(max=1).sqrt().float().repeat_interleave(SIZE)[:, None]
    expected = {}
    for step in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        clip.record(module, largest)
        optimizer.step()
        optimizer.finish()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = module.get_submodule(name).weight
            master = optimizer.state[weight]["master"].clone()
            if step:
                rows = 1.0 if name == "v_proj" else factors
                assert torch.equal(master, expected[name] * rows), (name, step)
            assert torch.equal(weight.cpu(), master.cpu().bfloat16()), (name, step)
            expected[name] = master
