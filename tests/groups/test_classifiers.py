"""Classifiers: a host's own classes are known to its integration, not to split_params."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import muonmesh as mm
from muonmesh.groups import Classifier, Role, Site, register, unregister

COVERS = (
    "groups.classifiers.register",
    "groups.classifiers.classified",
)


class FusedAttention(nn.Module):
    """A host's class as Megatron has them: no nn.Linear, bare parameters, its own attributes."""

    def __init__(self, heads: int = 4, groups: int = 2, dim: int = 6) -> None:
        super().__init__()
        self.queries, self.dim = heads // groups * dim, dim
        self.linear_qkv = nn.Parameter(torch.randn(groups * (self.queries + 2 * dim), 8))
        self.projection_bias = nn.Parameter(torch.zeros(8))
        self.blob = nn.Parameter(torch.randn(8, 3 * 10))  # three experts, in × out, side by side
        self.temperature_table = nn.Parameter(torch.randn(5, 7))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = FusedAttention()
        self.head = nn.Linear(8, 11)


def host(site: Site) -> Role | None:
    """Of the class alone: what it says of the rest, and of other classes, is None."""
    if not isinstance(site.module, FusedAttention):
        return None
    if site.key == "linear_qkv":
        module = site.module
        return Role("muon", "matrices", "host: q, k, v", ("interleaved", [module.queries, module.dim, module.dim], 0))
    if site.key == "blob":
        return Role("muon", "matrices", "host: experts", ("transposed", ("heads", site.shape[1] // 10, 0)))
    if site.key == "temperature_table":
        return Role("adamw", "embeddings", "host: a table", None)
    return None


@pytest.fixture
def registered() -> Iterator[list[Classifier]]:
    """Registers what is appended, for one test."""
    classifiers: list[Classifier] = [register(host)]
    yield classifiers
    for classifier in classifiers:
        unregister(classifier)


def entries_with_reasons(model: nn.Module, **options: object) -> dict[str, tuple[str, object, str]]:
    groups = mm.split_params(model, **options)
    return {
        name: (group["name"], group.get("matrices", [None] * (i + 1))[i], group["reasons"][i])
        for group in groups
        for i, name in enumerate(group["param_names"])
    }


def test_a_hosts_own_class_is_classified_by_its_classifier(registered: list[Classifier]) -> None:
    model = Model()
    by_classifier = entries_with_reasons(model)
    spec = ("interleaved", (12, 6, 6), 0)
    assert by_classifier["attention.linear_qkv"] == ("muon", spec, "host: q, k, v")
    assert by_classifier["attention.blob"] == ("muon", ("transposed", ("heads", 3, 0)), "host: experts")
    assert by_classifier["attention.temperature_table"] == ("adamw.embeddings", None, "host: a table")
    assert by_classifier["attention.projection_bias"] == ("adamw.vectors", None, "bias")
    optimizer = mm.from_model(model)
    matrices_of = {row.parameter: row.matrices for row in optimizer.explain().rows}
    assert matrices_of["attention.linear_qkv"] == "24×8, 2 of 12×8"
    assert matrices_of["attention.blob"] == "3 of 10×8"


def test_what_the_classifier_does_not_know_stays_as_it_was(registered: list[Classifier]) -> None:
    with_it = entries_with_reasons(Model())
    unregister(host)
    without = entries_with_reasons(Model())
    register(host)
    changed = {name for name in with_it if with_it[name] != without[name]}
    assert changed == {"attention.linear_qkv", "attention.blob", "attention.temperature_table"}
    assert without["attention.linear_qkv"][1] == "whole"


def test_overrides_and_the_modules_own_word_win(registered: list[Classifier], monkeypatch: pytest.MonkeyPatch) -> None:
    assert entries_with_reasons(Model(), overrides={"attention.blob": "adamw"})["attention.blob"][0] == "adamw.matrices"
    monkeypatch.setattr(FusedAttention, "muonmesh_matrices", {"linear_qkv": "whole"}, raising=False)
    assert entries_with_reasons(Model())["attention.linear_qkv"][1:] == ("whole", "muonmesh_matrices of FusedAttention")


def test_the_last_one_registered_is_asked_first(registered: list[Classifier]) -> None:
    def later(site: Site) -> Role | None:
        return Role("muon", "matrices", "later", "whole") if site.key == "blob" else None

    registered.append(register(later))
    assert register(later) is later  # once more changes nothing
    by_last = entries_with_reasons(Model())
    assert by_last["attention.blob"][2] == "later"
    assert by_last["attention.linear_qkv"][2] == "host: q, k, v"


@pytest.mark.parametrize(
    ("role", "error", "message"),
    [
        (
            "muon",
            TypeError,
            r"found 'muon' from the classifier .*wrong for FusedAttention; needed a muonmesh",
        ),
        (Role("muon", "head", "why", "whole"), ValueError, r"found Role\(.*; needed Role\(\"muon\", \"matrices\""),
        (Role("sgd", "matrices", "why", "whole"), ValueError, r"found Role\(algorithm='sgd'"),
        (Role("muon", "matrices", "why", None), ValueError, r"found Role\(.*matrices=None.*; needed Role\(\"muon\""),
    ],
)
def test_an_answer_that_cannot_be_is_refused(
    registered: list[Classifier], role: Role, error: type[Exception], message: str
) -> None:
    def wrong(site: Site) -> Role | None:
        return role if site.key == "blob" else None

    registered.append(register(wrong))
    with pytest.raises(error, match=rf"^attention\.blob: {message}.*\. Correct the classifier"):
        entries_with_reasons(Model())


def test_a_vector_for_muon_is_refused(registered: list[Classifier]) -> None:
    def wrong(site: Site) -> Role | None:
        return Role("muon", "matrices", "why", "whole") if site.key == "projection_bias" else None

    registered.append(register(wrong))
    with pytest.raises(ValueError, match=r"^attention\.projection_bias: found Muon .*needed two or more dims"):
        entries_with_reasons(Model())


def test_what_is_no_function_or_was_never_registered_is_refused() -> None:
    with pytest.raises(TypeError, match=r"register: found 3; needed a function"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unregister: found .*; needed one that register\(\) was given"):
        unregister(host)
