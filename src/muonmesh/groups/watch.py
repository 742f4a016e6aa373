"""Watch: reads the graph of a model's first training forward, and compares what it shows with what was guessed."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from muonmesh.errors import LayoutError, about, warn
from muonmesh.groups.example import tensors_in
from muonmesh.groups.facts import Facts, facts_of_graph
from muonmesh.groups.known import may_be_block
from muonmesh.groups.parameter_sites import Role, parameter_sites, shared_sites
from muonmesh.groups.roles import shared_roles
from muonmesh.layout.matrix import as_tuples
from muonmesh.names import patterns
from muonmesh.numerics.rules import is_matrix_rule


class Watch:
    """A watch on the first training forward of a model, which is compared with the roles of its parameters.

    A hook of the model reads the graph when the forward has returned, so that nothing of the graph is held. The hook
    removes itself then, and when the watch is gone. Forwards without gradients, in evaluation mode and in compiled or
    traced code are not read.

    Attributes:
        facts: What the forward showed of each parameter, by canonical name; None until there was one, and empty if it
            showed nothing.
    """

    def __init__(self, model: nn.Module, roles: Mapping[str, Role], *, part: bool = False) -> None:
        """Begin to watch.

        Args:
            model: The model without wrappers.
            roles: The roles by name, but of parameters for which the user has written algorithm or matrices.
            part: Whether it is a part of a model that the roles are of, so that other layers may read its outputs.
        """
        self.facts: dict[str, Facts] | None = None
        self._model, self._roles, self._part = weakref.ref(model), dict(roles), part
        self._unused = set[str]()  # parameters that the forward did not use; empty if it may have hidden them
        handle = model.register_forward_hook(_Hook(self))
        self._stop = weakref.finalize(self, handle.remove)
        self._stop.atexit = False

    def read(self, model: nn.Module, outputs: Any) -> None:
        """Read the graph of what a forward returned; if it shows no parameter, later ones are read, up to a step."""
        collects = gc.isenabled()
        gc.disable()  # the many small objects of a walk are no garbage
        try:
            roots = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
            if roots:
                named = list(_in_graph(model))
                shown, hides = facts_of_graph(roots, named, ())
                self.facts = {name: weight for name, weight in shown.items() if weight.does is not None}
                self._unused = set() if hides else {name for name, _ in named} - shown.keys()
        except Exception as error:  # training goes on as it would without a watch
            problem = f"The graph of its first forward could not be read ({type(error).__name__}: {error}), so what "
            problem += "print(split_params(model)) calls a guess stays one. Write watch=False to leave this out"
            warn(about(type(model).__name__, problem))
            self._stop()
        finally:
            if collects:
                gc.enable()
        if self.facts:
            self._stop()

    @property
    def shown(self) -> str | None:
        """A hash of what the forward showed, which ranks compare; None if it showed nothing, or there was none."""
        return hashlib.sha256(repr(sorted(self.facts.items())).encode()).hexdigest() if self.facts else None

    def compare(
        self, groups: Sequence[dict[str, Any]], missing: Collection[str], *, entire: bool, warns: bool = True
    ) -> LayoutError | None:
        """Compare the groups of an optimizer with what the forward showed; write what it showed into their reasons.

        What the user has written, what the forward did not show and what has no gradient is not compared. If the
        forward shows that Muon would have no matrix at all, the guess stays.

        Args:
            groups: The param groups.
            missing: The names of parameters without a gradient.
            entire: Whether the model is known to be no pipeline stage, so that its outputs are read by no other layer.
            warns: Whether this rank gives the warnings, if there are any.

        Returns:
            The error for weights that are trained by the wrong half; None if there are none.

        Warns:
            UserWarning: if a weight is fused and is trained as another number of matrices, or seems to make an output
                that other forwards may read.
        """
        self._stop()
        model = self._model()
        if model is None or self.facts is None:
            return None
        places = {name: (group, i) for group in groups for i, name in enumerate(group.get("param_names", ()))}
        wrong: dict[str, tuple[Role, Role]] = {}
        doubtful: dict[str, tuple[Role, Role]] = {}
        split: dict[str, tuple[Role, Role]] = {}
        entire = entire and not self._part and not may_be_block(model)
        # If what the forward did not use has a gradient, other forwards may read what seems to be an output here.
        sees_all = self._unused.isdisjoint(places.keys() - missing)
        for same in shared_sites(model):
            name, guess, facts = same[0].name, self._roles.get(same[0].name), self.facts.get(same[0].name)
            if guess is None or facts is None or name not in places or name in missing:
                continue
            if facts.last and not entire:
                facts = replace(facts, last=None)
            end = guess.kind in ("embeddings", "head")
            ends = {id(site.module): (guess.kind, guess.reason) for site in same if end}
            shown = shared_roles(same, ends, facts)[0]
            if shown.guess and not guess.guess:  # what this forward hides does not contradict what an example showed
                continue
            group, i = places[name]
            muon = is_matrix_rule(group["algorithm"])
            if muon != (guess.algorithm == "muon"):  # changed since
                continue
            if guess.algorithm != shown.algorithm:
                (wrong if sees_all or not facts.last else doubtful)[name] = guess, shown
            elif muon and guess.matrices != shown.matrices:
                if "matrices" in group and as_tuples(group["matrices"][i]) == guess.matrices:
                    split[name] = guess, shown
            elif "reasons" in group and not shown.guess:
                reason = group["reasons"][i].replace(guess.reason, shown.reason, 1)
                group["reasons"][i] = reason.replace("; a guess", "")
        trained = {name for name, (group, _) in places.items() if is_matrix_rule(group["algorithm"])}
        gained = {name for name, (_, shown) in wrong.items() if shown.algorithm == "muon"}
        if wrong and (gained or not trained <= wrong.keys()):  # a single layer is no model: it would leave Muon nothing
            problem = _message(wrong, places, "contradicts a guess, so no weight has been changed")
            return LayoutError(about(next(iter(wrong)), problem))
        if doubtful and warns:
            problem = _message(doubtful, places, "did not use all that has a gradient, and other forwards may differ")
            warn(about(next(iter(doubtful)), problem))
        if split and warns:
            problem = _message(split, places, "shows that fused weights are split otherwise than was guessed")
            warn(about(next(iter(split)), problem))
        return None


class _Hook:
    """The forward hook of a watch. It holds the watch weakly; a copy of it, of a copied model, does nothing."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        watch = None if self._watch is None else self._watch()
        if watch is None:
            for key in [key for key, hook in module._forward_hooks.items() if hook is self]:
                del module._forward_hooks[key]
        elif module.training and torch.is_grad_enabled() and not watch.facts:
            watch.read(module, outputs)


def _in_graph(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model and, where `fully_shard` holds them, the gathered ones that a forward reads."""
    gathered: dict[int, Any] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", ()):
            gathered |= {
                id(parameter.sharded_param): getattr(parameter, "_unsharded_param", None)
                for parameter in group.fsdp_params
            }
    names: dict[int, str] = {}
    for site in parameter_sites(model):
        name = names.setdefault(id(site.parameter), site.name)
        yield name, site.parameter
        if (other := gathered.get(id(site.parameter))) is not None:
            yield name, other


def _written(role: Role) -> str:
    """Return the value of an override that says a role."""
    if role.algorithm == "adamw" or role.matrices in ("whole", None):
        return f'"{role.algorithm}"'
    form = repr(role.matrices).replace("'", '"')
    return f'{{"algorithm": "muon", "matrices": {form}}}'


def _lines(differences: Mapping[str, tuple[Role, Role]], names: Collection[str], number: int) -> str:
    """Return ``overrides=`` for the guessed roles (0) or the shown roles (1) of parameters."""
    keys = patterns({name: _written(pair[number]) for name, pair in differences.items()}, names)
    return "overrides={" + ", ".join(f'r"{key}": {value}' for key, value in keys.items()) + "}"


def _message(differences: Mapping[str, tuple[Role, Role]], names: Collection[str], verdict: str) -> str:
    """Return the text of an error or a warning about guessed roles and the roles that were shown."""
    sentences = []
    for key, (guess, shown) in patterns(differences, names).items():
        trained = "trained by Muon" if guess.algorithm == "muon" else "trained by AdamW"
        state = f"split as {guess.matrices!r}" if guess.algorithm == shown.algorithm else trained
        sentences.append(f"{key} is {state} ({guess.reason}), and the forward shows: {shown.reason}")
    lines = f"{_lines(differences, names, 1)}, or {_lines(differences, names, 0)} to keep the guess"
    return f"The first training forward {verdict}. {'. '.join(sentences)}. Write {lines}"
