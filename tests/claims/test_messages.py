"""Messages: they name what the user wrote, and all of them are made in one place."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm
from muonmesh import checkpoint
from muonmesh.numerics.rules import RULES

COVERS = (
    "errors.about",
    "errors.calling",
)

WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    *(("ns_coefficients", value, {}) for value in ("polarexpress", [], [(1.0,)], [(float("nan"), 1.0)], 3, [3, 4])),
    *(("ns_steps", value, {}) for value in (0, -1, 2.5, True, "five")),
    *(("ns_method", value, {}) for value in ("fast", 3)),
    ("ns_method", "gram", {"ns_coefficients": [(-1.0, 2.0)]}),  # known only when the polynomials are looked at
    *(("ns_coefficients", value, {}) for value in ((3.4445, -4.775, 2.0315), "best")),
    *(("scale_mode", value, {}) for value in ("frob", 3, ["spectral"])),
    *(("lr", value, {}) for value in (-1.0, float("nan"), float("inf"), None, "fast", True)),
    *(("lr", value, {}) for value in (torch.tensor(-1.0), torch.tensor(float("nan")), torch.ones(2))),
    *(("momentum", value, {}) for value in (1.0, -0.1, float("nan"))),
    *(("nesterov", value, {}) for value in ("no", 1)),
    *(("weight_decay", value, {}) for value in (-0.1, float("inf"))),
    ("extra_scale_factor", 0.0, {}),
    *(("adamw_betas", value, {}) for value in ((0.9, 1.0), 0.9)),
    ("adamw_eps", -1e-8, {}),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 5)


def fine(**settings: Any) -> mm.Muon:
    optimizer = mm.from_model(Net(), **settings)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return optimizer


def constructor(wrong: dict[str, Any]) -> None:
    mm.Muon([nn.Parameter(torch.ones(4, 6))], **wrong)


def of_a_model(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), **wrong)


def group(wrong: dict[str, Any]) -> None:
    mm.Muon([{"params": [nn.Parameter(torch.ones(4, 6))], **wrong}])


def half(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), muon=wrong)


def override(wrong: dict[str, Any]) -> None:
    mm.from_model(Net(), overrides={"blocks": wrong})


def added(wrong: dict[str, Any]) -> None:
    fine().add_param_group({"params": [nn.Parameter(torch.ones(4, 6))], "algorithm": "muon", **wrong})


def later(call: Callable[[mm.Muon], Any]) -> Callable[[dict[str, Any]], None]:
    def path(wrong: dict[str, Any]) -> None:
        optimizer = fine()
        optimizer.step()
        optimizer.param_groups[0].update(wrong)
        call(optimizer)

    return path


def after_a_load(wrong: dict[str, Any]) -> None:
    optimizer = fine()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0].update(wrong)
    optimizer.load_state_dict(state)
    optimizer.step()


PATHS: dict[str, Callable[[dict[str, Any]], None]] = {
    "constructor": constructor,
    "from_model": of_a_model,
    "group": group,
    "muon=": half,
    "overrides=": override,
    "add_param_group": added,
    "step": later(lambda optimizer: optimizer.step()),
    "clip_grad_norm_": later(lambda optimizer: optimizer.clip_grad_norm_(1.0)),
    "metrics": later(lambda optimizer: optimizer.metrics()),
    "explain": later(lambda optimizer: optimizer.explain()),
    "load_state_dict": after_a_load,
}


@pytest.mark.parametrize(
    ("path", "key", "value", "beside"),
    [(path, *row) for path in PATHS for row in WRONG if path != "muon=" or not row[0].startswith("adamw")],
    ids=str,
)
def test_messages_name_the_key_that_was_written(path: str, key: str, value: Any, beside: dict[str, Any]) -> None:
    """Not the argument of the function below that found it, which nobody reads in a group."""
    with pytest.raises((ValueError, TypeError, mm.StateError)) as raised:
        PATHS[path]({**beside, key: value})
    message = str(raised.value)
    assert re.search(rf"\b{key}: found ", message), message
    assert not re.search(r"(?<!\w)(coefficients|steps|method|mode)\s*[=:]", message), message
    assert "; needed " in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("mode", "scale_mode"),
        ("coefficients", "ns_coefficients"),
        ("steps", "ns_steps"),
        ("method", "ns_method"),
        ("ns_step", "ns_steps"),
        ("momentun", "momentum"),
    ],
)
@pytest.mark.parametrize("path", ["group", "muon=", "overrides=", "add_param_group", "step", "explain"])
def test_an_unknown_key_raises_with_the_nearest_known_one(path: str, key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"found the key '{key}'; needed '{meant}'\. Rename it$"):
        PATHS[path]({key: 1})


def test_a_misspelt_setting_of_a_rule_gets_the_nearest_of_that_rule_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Tilted(mm.MuonRule):
        tilt_beta: float = 0.9

    monkeypatch.setitem(RULES, "tilted", Tilted)
    for key, message in (
        ("tilt_bta", "found the key 'tilt_bta'; needed 'tilt_beta'. Rename it"),
        ("tall_beta", "needed a setting (the nearest is 'tilt_beta'). Remove it or"),
        ("rb", "needed a setting. Remove it or"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            mm.from_model(Net(), rule="tilted", muon={key: 0.5})
    for key in ("tilt_bta", "tilt_beta"):
        with pytest.raises(TypeError, match=re.escape('Write rule="tilted", muon={"tilt_beta": ...} in from_model')):
            mm.from_model(Net(), rule="tilted", **{key: 0.5})


@pytest.mark.parametrize(
    ("argument", "write"),
    [
        ("beta1", "adamw_betas=(beta1, beta2)"),
        ("momentum_dtype", "state_dtype="),
        ("offload", 'state_device="cpu"'),
        ("exclude", 'overrides={name: "adamw"} in from_model'),
        ("muon_lrs", 'muon={"lr": ...} in from_model, or put it into a group'),
    ],
)
def test_what_others_call_an_argument_gets_the_line_to_write(argument: str, write: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"found the argument {argument!r}; needed") + ".*" + re.escape(write)
    ):
        mm.from_model(Net(), **{argument: 1})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rule", "found the key 'rule'; needed 'algorithm'. Rename it"),
        ("num_heads", """Write overrides={name: {"matrices": ('heads', 4, 0)}}, with your numbers"""),
    ],
)
def test_what_others_write_in_a_group_gets_the_line_to_write(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        mm.from_model(Net(), overrides={"weight": {key: 4}})


def test_parameters_given_to_clipping_as_to_torchs_function_are_not_needed() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"max_norm: found .*Write optimizer\.clip_grad_norm_\(1\.0\)"):
        mm.from_model(model).clip_grad_norm_(model.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["frozen", None, False])
def test_who_wants_to_freeze_by_an_override_is_told_how(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Write .*, or call requires_grad_\(False\) on a parameter to f"):
        mm.from_model(Net(), overrides={"blocks": value})


def test_orthogonalize_names_its_own_arguments() -> None:
    x = torch.ones(3, 4)
    for arguments, message in (
        ({"coefficients": "polarexpress"}, "coefficients: found 'polarexpress'"),
        ({"steps": 0}, "steps: found 0"),
        ({"method": "gram", "coefficients": [(-1.0, 2.0)]}, "method: found 'gram'"),
    ):
        with pytest.raises(ValueError, match=rf"^{message}"):
            mm.orthogonalize(x, **arguments)


# ------------------------------------------------------------------ one place

SOURCE = Path(__file__).parents[2] / "src" / "muonmesh"
ERRORS = ("ValueError", "TypeError", "MuonMeshError", "LayoutError", "PlanError", "StateError")
COMPOSERS = ("explain_error", "about")
BY_HAND = {
    # A part that may import nothing of ours, `errors` neither.
    "numerics/kernels/__init__.py": {"kernels", "kernels="},
    # What another rank's message said, which has its four parts.
    "comm/rendezvous.py": {"failed"},
    "checkpoint/state.py": {"str(error)"},
}
"""Files with the messages, by how they begin or as they are written, that are not composed there, and why."""
OTHERS = (
    "tools/cli/",
    "files.py",
    "checkpoint/manifest.py",
    "numerics/rules",
    "comm/exchange.py",
)
"""Not read here: what is said of files and options begins with their names, and the last two are being written anew."""


def begins_with(node: ast.expr) -> str:
    """What a message begins with, or the expression that it is."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value.split(":")[0]
    return ast.unparse(node)


def ends_in_a_full_stop(node: ast.expr) -> bool:
    last = node.values[-1] if isinstance(node, ast.JoinedStr) and node.values else node
    text = last.value if isinstance(last, ast.Constant) else ""
    return isinstance(text, str) and text.endswith(".") and not text.endswith("...")


def faults(file: str, source: str) -> Iterator[str]:
    """Messages of errors that are not composed by `explain_error`, or end in a full stop."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in COMPOSERS:
            yield from (f"{file}:{part.lineno}: full stop" for part in node.args if ends_in_a_full_stop(part))
        if node.func.id not in ERRORS or (node.args and begins_with(node.args[0]) in BY_HAND.get(file, ())):
            continue
        message = node.args[0] if node.args else None
        if not (isinstance(message, ast.Call) and isinstance(message.func, ast.Name) and message.func.id in COMPOSERS):
            yield f"{file}:{node.lineno}: {ast.unparse(node)[:100]}"


def test_every_message_is_composed_in_one_place() -> None:
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    read = {file: text for file, text in files.items() if not file.startswith(OTHERS)}
    assert len(read) > 50
    assert [fault for file, text in read.items() for fault in faults(file, text)] == []
    for file, messages in BY_HAND.items():  # none is left over
        calls = [node for node in ast.walk(ast.parse(files[file])) if isinstance(node, ast.Call) and node.args]
        assert messages <= {begins_with(node.args[0]) for node in calls}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise ValueError(explain_error('w', 'a', 'b', 'Write c'))", 0),
        ("error = error or LayoutError(about(name, error))", 0),
        ("raise ValueError('w: found a; needed b')", 1),
        ("raise PlanError(f'{name}: found a; needed b')", 1),
        ("raise StateError", 0),  # no message at all is no message by hand
        ("raise StateError()", 1),
        ("raise ValueError(explain_error('w', 'a', 'b', 'Write c.'))", 1),
        ("raise ValueError(explain_error('w', 'a', f'{b}.', 'Write c'))", 1),
        ("text = 'w: found a'\nraise TypeError(text)", 1),
    ],
)
def test_the_test_of_messages_finds_them(source: str, count: int) -> None:
    assert len(list(faults("file.py", source))) == count


def test_a_message_is_four_parts_without_a_full_stop() -> None:
    from muonmesh.errors import about, explain_error

    assert explain_error("w", "1", "2", "Write 2") == "w: found 1; needed 2. Write 2"
    assert explain_error("w", "1", "2") == "w: found 1; needed 2"
    assert about("rank 3", explain_error("w", "1", "2")) == "rank 3: w: found 1; needed 2"


@pytest.mark.own_ambient
def test_warnings_point_at_the_line_that_the_user_wrote() -> None:
    """Not at torch's wrappers of `step`, of which a scheduler adds one, and not at a file of ours."""
    model = nn.ModuleDict({"hidden": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}).to(torch.bfloat16)
    model.unused.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mm.split_params(nn.LayerNorm(8))  # no matrix
        mm.from_model(nn.LayerNorm(8))
        optimizer = mm.from_model(model, lr=1e-6)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model.unused.requires_grad_(True)
        model.hidden.weight.grad = torch.ones_like(model.hidden.weight)
        optimizer.step()  # rounding swallows it, and `unused` is in no group
    texts = [str(warning.message) for warning in caught]
    assert [sum(part in text for text in texts) for part in ("0 matrices", "rounding", "unfrozen")] == [2, 2, 1], texts
    assert {warning.filename for warning in caught} == {__file__}
    assert len({warning.lineno for warning in caught}) == 3


def test_a_rate_of_another_muon_is_told() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(512, 8))
    with pytest.warns(UserWarning, match=r"^lr: found 0\.02 with the default scale, .* up to 3 times .* Write"):
        mm.from_model(model, lr=0.02)
    with pytest.warns(UserWarning, match=r"^lr: found 0\.02 "):
        mm.from_model(model, muon={"lr": 0.02})
    with pytest.warns(UserWarning, match=r"^lr: found 1 "):
        mm.from_model(model, lr=1)
    for kernel in (nn.Conv1d(64, 64, 9), nn.Conv2d(64, 64, 3)):  # one matrix of 64 × 576
        with pytest.warns(UserWarning, match=r"^lr: found 0\.02 .* up to 5 times "):
            mm.from_model(nn.Sequential(nn.Embedding(8, 64), kernel, nn.Linear(64, 8)), lr=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.from_model(model, lr=3e-4)
        mm.from_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), lr=0.02)  # less than twice as large
        for mode in ("original", "match_rms_adamw"):
            mm.from_model(model, lr=0.02, scale_mode=mode)
            mm.from_model(model, muon={"lr": 0.02, "scale_mode": mode})


@pytest.mark.parametrize("key", ["name", "params", "param_names", "algorithm", "lr", "momentum"])
@pytest.mark.parametrize("call", ["step", "explain", "save"])
def test_a_key_that_a_group_has_lost_is_named_in_a_sentence(call: str, key: str, tmp_path: Path) -> None:
    optimizer, net = fine(), Net()
    optimizer.step()  # there is a plan, with whose groups others are compared
    del optimizer.param_groups[0][key]
    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "explain": optimizer.explain,
        "save": lambda: checkpoint.save(tmp_path / "saved", net, optimizer),
    }
    with pytest.raises(ValueError, match=rf"group .*(no {key!r}|{key}.*needed)"):
        calls[call]()
