"""Makers: refuses ZeroRedundancyOptimizer and DeepSpeed's engine, which replace the parameters of an optimizer."""

from __future__ import annotations

from types import FrameType

from muonmesh.errors import explain_error


def refuse_makers(frame: FrameType | None) -> None:
    """Raise if a framework constructs the optimizer with parameters other than the model's.

    Args:
        frame: The frame that calls the constructor. The frames that called it are searched too. No local variable of a
            frame is read, because the frame would keep it alive.

    Raises:
        TypeError: the framework is DeepSpeed's engine, or torch's ``ZeroRedundancyOptimizer``. The latter gives each
            rank an optimizer of a part of the parameters, so norms would cover only this part.
    """
    while frame is not None:
        maker = frame.f_globals.get("__name__"), frame.f_code.co_name
        if maker == ("deepspeed.runtime.engine", "_configure_optimizer"):
            refuse_engine("deepspeed")
        if maker == ("torch.distributed.optim.zero_redundancy_optimizer", "_init_local_optimizer"):
            needed = "all parameters on every rank, since ranks share the work by themselves"
            write = 'Write muonmesh.Muon(groups, process_group="world", shard_state=True) without '
            write += "ZeroRedundancyOptimizer: each rank then orthogonalizes and stores its share"
            raise TypeError(
                explain_error("ZeroRedundancyOptimizer", "muonmesh.Muon as its optimizer_class", needed, write)
            )
        frame = frame.f_back


def refuse_engine(user: str) -> None:
    """Refuse to be the optimizer of DeepSpeed's engine, which may have replaced parameters by flat tensors.

    Args:
        user: The name of the module that makes the optimizer, calls ``step``, or checks the type of the optimizer.

    Raises:
        TypeError: the module belongs to DeepSpeed.
    """
    if user.partition(".")[0] == "deepspeed":
        needed = "its settings, given to muonmesh's own function, which finds the parameters in the engine's tensors"
        write = "Write muonmesh.integrations.deepspeed.initialize(model=model, config=config, "
        write += 'optimizer={"lr": 3e-4}) in place of deepspeed.initialize'
        raise TypeError(explain_error("deepspeed.initialize", "a muonmesh.Muon as optimizer=", needed, write))
