"""Asked: the settings of a run, from the options on the command line and from defaults that depend on the machine."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from muonmesh.tools.cli.run_settings import CONFIG_FILE, MAY_CHANGE_ON_RESUME, Settings, load_settings, option


def settings_of(values: dict[str, Any], resume: str | None, given: set[str]) -> tuple[Settings, bool]:
    """Return the settings of a run, and whether the run exists and continues.

    Args:
        values: The values of all options that are settings. For None and "auto", the machine decides.
        resume: The value of ``--resume``.
        given: The names of the options that the user gave.

    Raises:
        ValueError: an option has a wrong value, or contradicts another option.
    """
    run = _going_on(resume, values["out"])
    return (_new(values), False) if run is None else (_resumed(run, values, given), True)


def _new(values: dict[str, Any]) -> Settings:
    """Return the settings of a new run, with values for all options that the machine decides."""
    found = {**values, "data": tuple(values["data"] or ())}

    def resolve(name: str, value: Any) -> None:
        found[name] = value if found[name] in (None, "auto") else found[name]

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    resolve("device", "cuda" if gpus else "cpu")
    on_gpus = found["device"] == "cuda"
    if on_gpus and not gpus:
        raise ValueError("--device cuda: found no GPU. Write: --device cpu")
    resolve("ranks", gpus if on_gpus else 2)
    ranks, steps = found["ranks"], found["steps"]
    if on_gpus and ranks > gpus:
        raise ValueError(f"--ranks {ranks}: found {gpus} GPUs, and each rank needs one. Write: --ranks {gpus}")
    resolve("dtype", "bf16" if _has_bf16(found["device"]) else "fp32")
    parts = max(1, ranks * found["grad_accum"])
    resolve("batch", -(-Settings.batch // parts) * parts)
    resolve("warmup", steps // 10)
    resolve("eval_every", max(1, steps // 20))
    resolve("out", Path("runs") / f"{Path(found['model']).stem}-{datetime.now():%Y%m%d-%H%M%S}")
    return Settings(**{**found, "out": str(found["out"])})


def _going_on(resume: str | None, out: Path | None) -> Path | None:
    """Return the directory of the run to continue; None if a new run starts."""
    if resume != "auto":
        return None if resume is None else Path(resume)
    if out is None:
        raise ValueError(
            "--resume auto: found no --out; needed the directory where the run is or will be. Write: --out runs/NAME"
        )
    return out if (out / CONFIG_FILE).is_file() else None


def _resumed(run: Path, values: dict[str, Any], given: set[str]) -> Settings:
    """Return the settings of a run that continues, with the changes that are allowed.

    Raises:
        ValueError: an option that may not change has another value than in the run.
    """
    before = load_settings(run, out=str(run))
    if (out := values.get("out")) is not None and out.resolve() != run.resolve():
        raise ValueError(f"--resume {run}: found --out {out}; needed the directory of that run. Leave it out")
    for name in sorted(given & {field.name for field in fields(Settings)} - MAY_CHANGE_ON_RESUME - {"out"}):
        value = tuple(values[name]) if isinstance(values[name], list) else values[name]
        if value not in ("auto", getattr(before, name)):
            raise ValueError(
                f"--resume {run}: found {option(name)} {value}, and {getattr(before, name)} in that run; needed the "
                "same. Leave it out, or start a new run"
            )
    return replace(before, **{name: values[name] for name in given & MAY_CHANGE_ON_RESUME})


def _has_bf16(device: str) -> bool:
    """Return whether the device has native bf16 products, which are faster than fp32. Emulated products are slower."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
