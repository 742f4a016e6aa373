"""Rule: the base class of rules for matrices, in parts that do not depend on how a matrix is sharded."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.newton_schulz import Method
from muonmesh.numerics.scale import ScaleMode, StepSize, update_scale
from muonmesh.numerics.setting import Setting, plain, whole

_scale_of = lru_cache(update_scale)  # pieces are many, shapes few

DecayMode: TypeAlias = Literal["full", "cautious"]
"""Which weights decay: all; or only those that the update also moves towards zero (arXiv 2510.12402)."""

State: TypeAlias = Mapping[str, Tensor]
"""The state of a parameter or matrix that a part of a rule gets, by name."""

KeptAs: TypeAlias = str
"""The kind of a state's shape. Per-element state is "momentum" (placed as the momentum, for `fold`) or "weights"
(placed as the weights, for `apply`). Other state has one number for each of the "rows" or "cols" of a matrix, or for
each "matrix"; or it is a matrix of two sizes, such as "rows×rows", "cols×cols", "rows×cols" or "rows×16", which the
owner of the matrix keeps."""

_KEPT_AS = re.compile("momentum|weights|rows|cols|matrix|(rows|cols|[1-9][0-9]*)×(rows|cols|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The settings that every rule has: a snapshot of a param group for one step.

    Attributes:
        scale_invariant: Whether the update stays the same when all gradients are multiplied by one number. Then
            clipping them by their norm makes no step smaller. The gradients of a rule without this are always clipped.
        never_negative: Names of state that no step makes negative, such as squares.
        lr: Learning rate, a number or a 0-d tensor.
        weight_decay: Decoupled: ``p ← p·(1 − lr·weight_decay)``.
        decay_mode: Whether all weights decay ("full"), or only those of the update's sign ("cautious").
        stochastic_rounding: Seed of the stochastic rounding of weights in bf16; None: they are rounded to nearest.
        takes_turns: Whether the rule does costly work in some steps only, and matrices take turns (`Rule.is_due`).
        steps_taken: The number of earlier calls of `Muon.step`, including calls that changed nothing, without calls at
            learning rate 0 and calls that raised an error. The group counts and saves it only if the rule depends on
            it: see `counts_steps`.
    """

    scale_invariant: ClassVar[bool] = False
    never_negative: ClassVar[tuple[str, ...]] = ()
    takes_turns: ClassVar[bool] = False

    lr: float | Tensor
    weight_decay: float
    decay_mode: DecayMode
    stochastic_rounding: int | None = field(default=None, kw_only=True)
    steps_taken: int = field(default=0, kw_only=True, metadata={"setting": whole(0, 0, "a whole number of at least 0")})

    @property
    def counts_steps(self) -> bool:
        """Whether the optimizer counts steps for this rule, for turns or for random numbers."""
        return self.takes_turns or self.stochastic_rounding is not None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Any:
        """Return a rule with the settings of a param group; a missing key takes the default.

        Raises:
            TypeError: the group lacks the key of a field without a default.
        """
        for key, rule_field in _read(cls).items():
            if key not in group and rule_field.default is rule_field.default_factory is MISSING:
                needed, write = (
                    "its value: it has no default",
                    f'Write muon={{"{key}": ...}} in from_model, or put it into a group',
                )
                raise TypeError(explain_error(f"a group of {cls.__name__}", f"no {key!r}", needed, write))
        values = {rule_field.name: plain(group[key]) for key, rule_field in _read(cls).items() if key in group}
        if isinstance(values["lr"], Tensor):  # one with a dim would have weights computed in its own dtype
            values["lr"] = values["lr"].reshape(())
        return cls(**values)

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the keys of a param group that this rule reads."""
        return tuple(_read(cls))

    def check(self) -> None:
        """Check that the settings have allowed values.

        Raises:
            ValueError: a setting is out of range.
        """
        for key, rule_field in _read(type(self)).items():
            setting, value = rule_field.metadata.get("setting", Setting()), getattr(self, rule_field.name)
            if not setting.fits(value):
                raise ValueError(explain_error(key, f"{value!r}", setting.needed))

    def decay(self, weights: Tensor, update: Tensor) -> None:
        """Decay weights in place.

        The cautious mode of Chen et al. (arXiv 2510.12402, algorithm 1) leaves a weight alone if the step would move it
        away from zero: with ``p ← p − lr·u`` that is where u and p have different signs. The signs are compared,
        because the product of u and p may underflow.

        Args:
            weights: Any shape, written.
            update: Same shape, u of the step ``p ← p − lr·u`` up to a positive factor; read only.
        """
        if not self.weight_decay:
            return
        keep = 1 - self.lr * self.weight_decay
        if self.decay_mode == "full":
            weights.mul_(keep)
        else:
            agree = update.sign().mul_(weights.sign()) >= 0
            weights.copy_(torch.where(agree, weights * keep, weights))


def _fields_read(rule: Any) -> dict[str, Field[Any]]:
    """Return the fields of a rule that are read from a group, by their keys. A key is the name, unless declared."""
    return {
        rule_field.metadata.get("key", rule_field.name): rule_field
        for rule_field in fields(rule)
        if rule_field.name != "stagger"
    }


_read: Callable[[Any], dict[str, Field[Any]]] = lru_cache(_fields_read)  # rules are few, and groups are read often


@dataclass(frozen=True, slots=True)
class Rule(Hyperparameters):
    """The update of the matrices of a param group, as methods that a step calls in a fixed order.

    1. `fold` and `direction` work element by element, on every rank that stores a part of the momentum.
    2. The owner, which is the rank that orthogonalizes the matrix, receives the whole direction. The owner calls
       `balance`, orthogonalizes, and calls `whole`.
    3. `summands` works element by element, on every rank that stores a part of the weights. It is called only if the
       rule needs sums over whole matrices. The sums are the same on all ranks.
    4. `keep` is called on the owner, if the rule needs sums.
    5. `apply` works element by element, on every rank that stores a part of the weights. State of kind "matrix" reaches
       `apply` as it was before `keep`.

    To write a rule of your own, override some of these methods, declare its state with `keeps`, and call
    `register_rule`. Without any override, the rule is Muon without momentum.

    A method that works element by element receives a part of the elements, in any shape. For each element, its result
    may depend on the inputs of this element only, for tensors of every length. You may use ``lerp_``, ``mul_``,
    ``sub_``, ``copy_``, ``where``, ``sqrt`` and casts. Scalars may come from the fields. `muonmesh.testing.prove_rule`
    checks a rule for this.

    Attributes:
        orthogonalizes: Whether directions are orthogonalized. If not, `whole` receives the result of `balance`.
        sees_direction: Whether `whole` also receives the direction before it was orthogonalized, as
            ``state["direction"]``, in the shape of the update.
        unsuited_warning: The text of the warning about a matrix for which `unsuited` returns True. ``{name}`` stands
            for the name of the parameter.
        scale_mode: How the step depends on rows and columns, see `update_scale`.
        extra_scale_factor: A factor of the scale.
        coefficients: The coefficient set, see `orthogonalize`. Its key in a param group is ``ns_coefficients``.
        steps: The number of Newton–Schulz steps. Its key in a param group is ``ns_steps``.
        method: The method, see `orthogonalize`. Its key in a param group is ``ns_method``.
        stagger: The number of the matrix on which `balance` or `whole` works. It decides when the matrix `is_due`.
    """

    orthogonalizes: ClassVar[bool] = True
    sees_direction: ClassVar[bool] = False
    unsuited_warning: ClassVar[str] = ""

    scale_mode: ScaleMode
    extra_scale_factor: float
    coefficients: Coefficients = field(metadata={"key": "ns_coefficients"})
    steps: int = field(metadata={"key": "ns_steps"})
    method: Method = field(metadata={"key": "ns_method"})
    stagger: int = field(default=0, kw_only=True)

    def is_due(self, every: int) -> bool:
        """Return True in one of ``every`` steps, for work in `balance` or `whole` that is not needed in each step.

        The name of the parameter decides in which step. Layers of one kind take turns one after the other. The answer
        is the same in every layout, on every rank, and after a resume.

        Raises:
            TypeError: the rule has not ``takes_turns``, without which the answer would never change.
        """
        if not self.takes_turns:
            needed, write = "True, so that the optimizer counts steps", "Write takes_turns = True into the class"
            raise TypeError(explain_error(f"{type(self).__name__}.is_due", "takes_turns = False", needed, write))
        return (self.steps_taken + self.stagger) % every == 0

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the state of the rule: for each name in the optimizer's state, the kind of its shape.

        State starts as zeros. The state of a matrix whose gradient is zero does not change.
        """
        return {}

    def fold(self, gradient: Tensor, state: State) -> None:
        """Add a gradient to the momentum, in place.

        Args:
            gradient: Any shape, any real dtype, read only.
            state: The state of kind "momentum". Each tensor has the shape of the gradient and ``state_dtype``.
        """

    def direction(self, gradient: Tensor, state: State) -> Tensor:
        """Return the direction, which the owner orthogonalizes; called after `fold`.

        Args:
            gradient: Any shape, any real dtype, read only.
            state: The state of kind "momentum". Each tensor has the shape of the gradient; read only.

        Returns:
            A tensor of the same shape and any real dtype. It is rounded to the compute dtype.
        """
        return gradient

    def balance(self, direction: Tensor, state: State) -> Tensor:
        """Change whole matrices before they are orthogonalized, and return them.

        You may use any operation, as in `whole`. A factor on a whole matrix has no effect, because orthogonalization
        removes it.

        Args:
            direction: Shape (1, rows, cols), always out × in; fp32 or wider. You may write to it.
            state: As in `whole`, which is called afterwards with the same state.

        Returns:
            A tensor of shape (1, rows, cols). It is rounded to the compute dtype.
        """
        return direction

    def whole(self, update: Tensor, state: State) -> Tensor:
        """Change whole orthogonalized matrices before they are scattered and scaled, and return them.

        You may use any operation: every layout passes one matrix at a time, in the same memory order, and on a CPU on
        one thread. A row may be zero: divide by ``torch.where(norm == 0, 1, norm)``.

        The learning rate and `scale` multiply what you return. `scale` expects the Frobenius norm √min(rows, cols) of
        an orthogonal matrix.

        Args:
            update: Shape (1, rows, cols), always out × in; fp32 or wider. You may write to it.
            state: State in the dtype of ``update``, written in place. Its shape is (1, rows, 1) for kind "rows",
                (1, 1, cols) for "cols", (1, 1, 1) for "matrix", and (1, rows, rows) for "rows×rows".

        Returns:
            Shape (1, rows, cols).
        """
        return update

    def apply(
        self, weights: Tensor, update: Tensor, size: float | Tensor, state: State, sums: tuple[Tensor, ...] = ()
    ) -> None:
        """Decay and update weights in place: ``p ← p·(1 − lr·wd) − size·u``.

        Args:
            weights: Any shape, fp32 or wider, written; rounded once to the dtype of the parameter.
            update: The same shape and dtype. You may write to it. `Muon.metrics` reads its final content as the step.
            size: The learning rate times the scale of the whole matrix.
            state: The state of kind "weights", of the same shape, in ``state_dtype``, written in place. With sums, also
                the state of kind "matrix", 0-d fp64, read only, as it was before `keep`.
            sums: The sum of each of the `summands` over the whole matrix, 0-d fp64; NaN if an element was not finite.
                Empty if the rule needs no sums.
        """
        self.decay(weights, update)
        weights.sub_(update.mul_(size))

    def summands(self, weights: Tensor, update: Tensor, size: float | Tensor, state: State) -> tuple[Tensor, ...]:
        """Return tensors whose sums over the whole matrix `apply` needs.

        Override this method and `apply` if a rule needs sums over a matrix. Each sum counts every element once,
        however many ranks hold it. A sum has the same bits under every sharding.

        This method is called more than once in a step and must not write anything. If a summand depends on updated
        state, such as a second moment, compute the new value here without storing it, and again in `apply`.

        Args:
            weights: Any shape, fp32 or wider, before the step, read only.
            update: Update of the same shape and dtype as the weights. The method may write into it.
            size: Learning rate times the scale of the whole matrix.
            state: The state of kind "weights" before the step, of the same shape, in ``state_dtype``, read only.

        Returns:
            One tensor of the same shape for each sum, always the same number; added up in fp64. Write
            ``update.double().square()``, since squares of small fp32 numbers vanish.
        """
        return ()

    def keep(self, state: State, sums: tuple[Tensor, ...]) -> None:
        """Update the state of kind "matrix" from the sums over a matrix.

        Args:
            state: The state of kind "matrix", 0-d each, fp32 or wider, written in place.
            sums: As in `apply`.
        """

    def unsuited(self, sums: tuple[Tensor, ...]) -> Tensor | None:
        """Return whether the rule does not suit a matrix; the optimizer then warns once, by `unsuited_warning`.

        Args:
            sums: As in `apply`.

        Returns:
            A 0-d bool tensor; None if the rule suits every matrix.
        """
        return None

    def count_of_sums(self) -> int:
        """Return the number of sums over whole matrices that the rule needs.

        Raises:
            TypeError: a summand is no tensor of the shape of the weights.
        """
        if not self.overrides("summands"):
            return 0
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        state = {key: nothing for key, kind in self.keeps().items() if kind == "weights"}
        terms: Any = self.summands(nothing, nothing.clone(), 1.0, state)
        if not isinstance(terms, tuple) or not all(isinstance(x, Tensor) and x.shape == nothing.shape for x in terms):
            returned = f"{terms!r} for weights of shape {tuple(nothing.shape)}"
            needed = "a tuple of tensors of the shape of the weights, which are added up later"
            write = "Write return (update.double().square(),)"
            raise TypeError(explain_error(f"{type(self).__name__}.summands", returned, needed, write))
        return len(terms)

    @classmethod
    def overrides(cls, *methods: str) -> bool:
        """Return whether the rule has its own version of one of these methods of `Rule`, so that a step calls it."""
        return any(getattr(cls, method) is not getattr(Rule, method) for method in methods)

    def flops(self, rows: int, cols: int) -> int:
        """Return the floating-point operations of `balance` and `whole` for a matrix of rows × cols, 0 if they are few.

        The plan adds the operations of orthogonalization, and gives all owners about the same work.
        """
        return 0

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of the learning rate for a whole matrix of rows × cols."""
        return self.extra_scale_factor * _scale_of(rows, cols, self.scale_mode)

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return RMS and spectral norm of a step of a whole matrix, rows × cols; NaN if they are not known.

        Override this method in a rule of your own that has its own `whole`, `scale` or `apply`, or does not
        orthogonalize. Otherwise the sizes of such a rule are NaN, and `Muon.explain` leaves them out. Those of
        muonmesh with their own `whole` or `apply` keep the RMS, but no longer have equal singular values.
        """
        sized = {"whole", "scale", "apply"}
        own_classes = (kind for kind in type(self).__mro__ if not kind.__module__.startswith("muonmesh."))
        if not self.orthogonalizes or any(sized & vars(kind).keys() for kind in own_classes):
            return StepSize(math.nan, math.nan)
        spectral = float(self.lr) * self.extra_scale_factor * update_scale(rows, cols, self.scale_mode)
        orthogonal = not self.overrides("whole", "apply")
        return StepSize(spectral / math.sqrt(max(rows, cols)), spectral if orthogonal else math.nan)


def check_result(part: Callable[..., Any], result: object, shape: tuple[int, ...], like: str = "its arguments") -> None:
    """Check the result of a part of a rule, since torch would broadcast one of another shape.

    Args:
        part: The method of the rule.
        result: What it has returned.
        shape: The shape that is needed.
        like: What has this shape, for the message.

    Raises:
        ValueError: the result is no tensor of this shape.
    """
    if not isinstance(result, Tensor) or result.shape != shape:
        found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"{type(result).__name__}"
        needed = f"a tensor with the shape of {like}, {tuple(shape)}"
        raise ValueError(explain_error(part.__qualname__, f"a result of {found}", needed, "Return such a tensor"))


def check_keeps(rule: Hyperparameters) -> None:
    """Check that the kinds of state in `Rule.keeps` exist.

    Raises:
        ValueError: a kind does not exist.
    """
    for key, kind in rule.keeps().items() if isinstance(rule, Rule) else ():
        if not _KEPT_AS.fullmatch(str(kind)):
            subject, fault = f"{type(rule).__name__}.keeps", f"{key!r} kept as {kind!r}"
            needed = '"momentum", "weights", "rows", "cols", "matrix" or two sizes: "rows×rows", "cols×cols", "rows×16"'
            close = difflib.get_close_matches(str(kind), ("momentum", "rows", "cols", "matrix"), 1)
            write = f"Write {{{key!r}: {next(iter(close), 'weights')!r}}}"
            raise ValueError(explain_error(subject, fault, needed, write))
