"""Mending: what DeepSpeed 0.19 gets wrong in its own checkpoints of a client optimizer, put right on the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)

from muonmesh.checkpoint.zero import load_inert
from muonmesh.errors import StateError, explain_error
from muonmesh.integrations.deepspeed.optimizer import EngineMuon, kept_as_moments
from muonmesh.numerics.rules import rule_of


def mend(engine: Any, optimizer: EngineMuon) -> None:
    """Mend an engine in place.

    - ``round_robin_gradients`` reorders the flat tensors but not the links from parameters to their fragments, so
      that `safe_get_full_fp32_param` and universal checkpoints mix parameters up.
    - The links to optimizer state are made by the first step only, and lost by loading a checkpoint after it.
    - A universal checkpoint of stage 1 or 2 cannot be converted without ``universal_checkpoint_info``.
    - A universal checkpoint of stage 3 loads the settings of the first group into all groups.
    """
    zero = engine.optimizer
    if hasattr(zero, "round_robin_bit16_groups"):
        zero._link_all_hp_params = _in_order(zero, zero._link_all_hp_params)
        zero._link_all_hp_params()
        zero._param_slice_mappings = zero._create_param_mapping()
    if getattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, None) is None:
        info = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
        setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, info)
    engine.load_checkpoint = _checked(engine, engine.load_checkpoint)
    zero.load_state_dict = _loading(optimizer, zero, zero.load_state_dict)
    _link_states(zero)


def _in_order(zero: Any, link: Callable[[], None]) -> Callable[[], None]:
    """Return what links parameters and fragments as DeepSpeed does, but in the order in which these lie."""

    def link_in_order() -> None:
        given, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
        try:
            link()
        finally:
            zero.bit16_groups = given

    return link_in_order


def _link_states(zero: Any) -> None:
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _loading(optimizer: EngineMuon, zero: Any, original: Callable[..., None]) -> Callable[..., None]:
    """Return ZeRO's ``load_state_dict`` with a check before and the settings of every group restored after."""

    def load_state_dict(state_dict_list: Any, **given: Any) -> None:
        folder, groups = given.get("checkpoint_folder"), None
        if folder is not None and given.get("load_optimizer_states", True):
            groups = _universal(Path(folder))["param_groups"]
            optimizer.check_groups(groups)
            for group in groups:
                if lost := [key for key in rule_of(group).keeps() if key not in kept_as_moments(group)]:
                    found = f"a universal checkpoint of {group['algorithm']!r}, without its {', '.join(lost)}"
                    needed = "one of a rule that keeps moments alone, since DeepSpeed's converter drops the rest"
                    write = "Write muonmesh.checkpoint.save there and muonmesh.checkpoint.load here"
                    raise StateError(explain_error(str(folder), found, needed, write))
        original(state_dict_list, **given)
        if groups is not None:
            optimizer.restore_groups(groups)
        optimizer.release_unused()
        _link_states(zero)

    return load_state_dict


def _checked(engine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the engine's ``load_checkpoint`` with a check that a universal checkpoint is of this kind of ZeRO."""

    def load_checkpoint(load_dir: str, tag: str | None = None, *arguments: Any, **others: Any) -> Any:
        latest = Path(load_dir) / "latest_universal"
        if engine.load_universal_checkpoint() and (tag is not None or latest.exists()):
            folder = Path(load_dir) / (tag or latest.read_text().strip())
            was_3, is_3 = "fp32_flat_groups" in _universal(folder), engine.zero_optimization_stage() == 3
            if was_3 != is_3:
                found = f"a universal checkpoint of ZeRO stage {'3' if was_3 else '1 or 2'}"
                needed = f"one of stage {'3' if is_3 else '1 or 2'}: DeepSpeed cannot convert between them"
                write = "Write muonmesh.checkpoint.save there and muonmesh.checkpoint.load here"
                raise StateError(explain_error(str(folder), found, needed, write))
        return original(load_dir, tag, *arguments, **others)

    return load_checkpoint


def _universal(folder: Path) -> Mapping[str, Any]:
    """Return what a universal checkpoint says of the optimizer as a whole."""
    file = folder / "zero" / "optimizer_state.pt"
    if not file.exists():
        write = "Run python -m deepspeed.checkpoint.ds_to_universal on the checkpoint first"
        raise StateError(explain_error(str(folder), "no zero/optimizer_state.pt", "a universal checkpoint", write))
    return load_inert(file)
