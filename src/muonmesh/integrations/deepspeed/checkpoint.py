"""Checkpoint: gives `muonmesh.checkpoint` the parameters and state of an engine, at every ZeRO stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from muonmesh.checkpoint.folder import AGAIN
from muonmesh.comm.gather_objects import on_every_rank, on_first_rank, results_of_all_ranks
from muonmesh.errors import FileError, StateError, explain_error
from muonmesh.files import cannot_write, replace_text, writing
from muonmesh.names import canonical_name

_PLACES = "Set round_robin_gradients, sub_group_size, parameter_alignment and the sizes of expert parallelism as when "
_PLACES += "it was saved, or use muonmesh.checkpoint.save and muonmesh.checkpoint.load. If another optimizer saved it, "
_PLACES += "load only the weights: load_checkpoint(folder, load_optimizer_states=False)"
ELSEWHERE = "parameters in other places of DeepSpeed's flat tensors", "the places in this engine", _PLACES
"""What was found, what is needed and what to write, if flat tensors were saved that hold their parameters elsewhere."""


def expert_names(model: nn.Module) -> dict[str, str]:
    """Return the checkpoint names of the parameters and buffers of this rank's experts, by their names in the model.

    In the model, each rank numbers its experts from 0. In a checkpoint, an expert has its number among the experts of
    all ranks, so a checkpoint loads at any size of expert parallelism.
    """
    names_in_checkpoint = {}
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        size, ranks = module.num_local_experts, next((p.group_name for p in module.parameters()), None)
        first = 0 if ranks is None else size * deepspeed_groups._get_expert_parallel_rank(ranks)
        for number, expert in enumerate(module.deepspeed_experts):
            for name, _ in chain(expert.named_parameters(remove_duplicate=False), expert.named_buffers()):
                names = [f"{path}.deepspeed_experts.{index}.{name}" for index in (number, first + number)]
                names_in_checkpoint[canonical_name(names[0])] = canonical_name(names[1])
    return names_in_checkpoint


def masters_of(zero: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the fp32 weights that this rank steps, each with the module's weights that DeepSpeed rounds from it.

    Both have the same shape and order. Weights that are swapped out have no memory here and are left out.
    """
    pairs: Iterable[tuple[Any, Any]] = ()
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        pairs = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    elif hasattr(zero, "fp32_groups"):
        pairs = zip(chain(*zero.fp32_groups), chain(*zero.fp16_groups), strict=True)
    elif hasattr(zero, "real_dp_process_group"):
        stages = hasattr(zero, "parallel_partitioned_bit16_groups")  # 1 and 2; else `BF16_Optimizer`
        masters = zero.single_partition_of_fp32_groups if stages else zero.fp32_groups_flat_partition
        parts = zero.parallel_partitioned_bit16_groups if stages else zero.bf16_partitioned_groups
        ranks = [dist.get_rank(group) for group in zero.real_dp_process_group]
        pairs = [(master, part[rank]) for master, part, rank in zip(masters, parts, ranks, strict=True)]
    for master, weight in pairs:
        if weight is not None and weight.numel() == master.numel():
            yield master, weight.detach()


def publish(zero: Any) -> None:
    """Copy the current fp32 weights of a ZeRO optimizer into the weights with which the module computes."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
    elif hasattr(zero, "fp16_partitioned_groups_flat"):
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    elif hasattr(zero, "fp32_groups"):
        for master, weight in masters_of(zero):
            weight.copy_(master.detach())


def checked_load(engine: Any) -> Callable[..., Any]:
    """Return the method ``load_checkpoint`` of an engine, which now checks the folder before any rank reads.

    DeepSpeed alone would end in errors without a cause, let ranks wait for others, or load no weights.

    Raises:
        StateError: on every rank, if parameters lie elsewhere in the flat tensors that were saved.
        FileError: on every rank, if an engine of another ZeRO stage, dtype or number of ranks saved the folder; if the
            tag has no files, or differs between ranks; or if DeepSpeed would not load its weights.
    """
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @wraps(load)
    def load_checkpoint(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        tags = results_of_all_ranks(lambda: _check_folder(engine, **bound.arguments), kind=FileError)
        if tags != tags[:1] * len(tags):  # the others would wait for those that load nothing
            problem, needed = f"other tags on some ranks: {dict(enumerate(tags))}", "the same one on all ranks"
            write = "Make the file latest of the first rank visible to all, or pass tag= to all"
            raise FileError(explain_error(f"{bound.arguments['load_dir']}", problem, needed, write))
        try:
            loaded = load(*arguments, **named)
        except RuntimeError as error:  # on every rank, before it has looked at the groups
            if "parameter-alignment layout" not in str(error):
                raise
            raise StateError(explain_error(f"{bound.arguments['load_dir']}/{tags[0]}", *ELSEWHERE)) from error
        if not bound.arguments["load_optimizer_states"] and hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()  # or at stage 0 the next step would return to the old masters
        if loaded[0] is not None:
            engine.basic_optimizer.weights_loaded(masters=_loads_state(**bound.arguments))
        return loaded

    return load_checkpoint


def checked_save(engine: Any) -> Callable[..., Any]:
    """Return the method ``save_checkpoint`` of an engine, which now raises on every rank if one rank cannot write.

    DeepSpeed alone would raise on that rank only, and the others would wait for it in a barrier. Errors of writing are
    kept until all ranks have written. So the file ``latest`` still names the last complete checkpoint.

    Raises:
        FileError: on every rank: a rank could not write a file.
    """
    save = engine.save_checkpoint

    @wraps(save)
    def save_checkpoint(*arguments: Any, **named: Any) -> Any:
        files = engine.checkpoint_engine
        if files.is_decoupled():  # another process writes, later
            return save(*arguments, **named)
        failed: list[str] = []
        agreed = False
        write, make, commit = files.save, files.makedirs, files.commit

        def noting(path: Any, work: Callable[[], Any]) -> Any:
            try:
                return work()
            except (OSError, RuntimeError, MemoryError) as error:
                failed.append(cannot_write(Path(path), error, again=AGAIN))

        def check() -> None:
            if failed:
                raise FileError(failed[0])

        def agree() -> None:
            nonlocal agreed
            agreed = True
            on_every_rank(check)

        def commit_all(info: Any) -> Any:
            agree()
            if info.save_latest:  # before DeepSpeed opens the file, which would leave it empty on a full disk
                latest = Path(info.save_dir, "latest")
                with writing(latest, again=AGAIN):
                    on_first_rank(lambda: replace_text(latest, info.tag))
            return commit(info)

        files.save = lambda state_dict, path: noting(path, lambda: write(state_dict, path))
        files.makedirs = lambda path, exist_ok=False: noting(path, lambda: make(path, exist_ok=exist_ok))
        files.commit = commit_all
        try:
            return save(*arguments, **named)
        except OSError as error:  # of a file that DeepSpeed writes itself, last and on some ranks
            if agreed:
                raise
            failed.append(cannot_write(Path(error.filename2 or error.filename or ""), error, again=AGAIN))
            agree()
            raise
        finally:
            del files.save, files.makedirs, files.commit

    return save_checkpoint


def _loads_state(load_optimizer_states: bool, load_module_only: bool, **_: Any) -> bool:
    """Return whether arguments of ``load_checkpoint`` load the optimizer's state and the fp32 weights."""
    return load_optimizer_states and not load_module_only


def _check_folder(
    engine: Any, load_dir: Any, tag: Any, load_optimizer_states: bool, load_module_only: bool, **_: Any
) -> str | None:
    """Return the tag that DeepSpeed will load; None if this rank finds no file ``latest``, so that it loads nothing."""
    pointer = Path(load_dir, "latest")
    latest = pointer.read_text().strip() if pointer.is_file() else None
    tag = latest if tag is None else str(tag)
    if tag is None:
        return None
    names = {path.name for path in Path(load_dir, tag).glob("*_states.pt")}
    if not names:
        tags = sorted({path.parent.name for path in Path(load_dir).glob("*/*_states.pt")})
        needed = f"a tag of {tags}" if tags else "the folder that save_checkpoint was given"
        write = "Write load_checkpoint(folder, tag=...) with a tag that is there"
        raise FileError(explain_error(f"{load_dir}/{tag}", "no checkpoint", needed, write))
    whole = _loads_state(load_optimizer_states, load_module_only)
    needed_files, foreign = {engine._get_ckpt_name(load_dir, tag)}, {name for name in names if "zero_pp_rank_" in name}
    if not engine.zero_optimization() and whole and engine.has_moe_layers:  # of ranks that share the most experts
        largest = deepspeed_groups._get_max_expert_size_name()
        among = (
            deepspeed_groups._get_expert_parallel_rank(largest),
            deepspeed_groups._get_expert_parallel_world_size(largest),
        )
        beside, further = (engine._get_optimizer_ckpt_name(load_dir, tag, number) for number in among)
        needed_files |= {beside}
        foreign |= {Path(further).name}
    if engine.zero_optimization():
        ranks, bf16 = dist.get_world_size(engine.optimizer.dp_process_group), engine.bfloat16_enabled()
        beyond = engine._get_rank_zero_ckpt_name(load_dir, tag, engine.checkpoint_mp_rank, ranks, bf16)
        needed_files |= {engine._get_zero_ckpt_name(load_dir, tag)} if whole else set()
        foreign = {Path(beyond).name}
    wrong = [f"without {name}" for name in sorted({Path(path).name for path in needed_files} - names)]
    wrong += [f"with {name}" for name in sorted(foreign & names)] if whole else []
    if wrong:
        problem, needed = f"a checkpoint {wrong[0]}", "one of an engine with the same ZeRO stage, dtype and ranks"
        write = "In a run like the one that saved it, write muonmesh.checkpoint.save(folder, engine, engine), and here "
        write += "muonmesh.checkpoint.load(folder, engine, engine)"
        raise FileError(explain_error(f"{load_dir}/{tag}", problem, needed, write))
    if engine.zero_optimization_partition_weights() and not whole and (load_optimizer_states or tag != latest):
        problem = "load_module_only=True" if load_optimizer_states else "load_optimizer_states=False with an older tag"
        needed = "the state too: at stage 3 DeepSpeed would load no weights, or those of the latest tag"
        write = "Before initialize, write deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(model, "
        write += f"{str(load_dir)!r}, {tag!r})"
        raise FileError(explain_error("load_checkpoint", problem, needed, write))
    return str(tag)
