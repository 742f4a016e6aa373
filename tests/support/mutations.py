"""Mutations: what happens to files and to state on disks and at the hands of people, drawn from a seed.

Every mutation is a function of its number: `mutate(folder, names, outside, number)` does the same in every process, so
a number in a message is all that is needed to see it again.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

QUICK, MANY = 60, 2000
"""Mutations of a format, and of a package's state, in `make test` and in `make soak`."""


class Acts:
    """Pickled, a program that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _flip(content: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def _grow(content: bytearray, draw: random.Random) -> None:
    content.extend(draw.randbytes(draw.choice((1, 64, 5000))))


def _blank(content: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(content))
    end = min(len(content), begin + draw.choice((1, 16, 512)))
    content[begin:end] = bytes(end - begin)


def _exchange_parts(content: bytearray, draw: random.Random) -> None:
    size = max(1, min(draw.choice((1, 8, 64, 512)), len(content) // 2))
    first, other = (draw.randrange(len(content) - size + 1) for _ in range(2))
    part = bytes(content[first : first + size])
    content[first : first + size] = content[other : other + size]
    content[other : other + size] = part


def _drop_part(content: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(content))
    del content[begin : begin + draw.choice((1, 8, 64))]


def _escape(content: bytearray, draw: random.Random) -> None:
    """Names of files become names elsewhere, as long as they were so that what tells lengths stays true."""
    for name in (b"__0_0.distcp", b"__1_0.distcp", b"settings.json", b"model.safetensors"):
        target = draw.choice((b"../", b"/etc/", b"a/../", b"\x00"))
        content[:] = content.replace(name, (target + name)[: len(name)])


BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip, _flip, _cut, _grow, _blank, _exchange_parts, _drop_part, _escape),
)


def mutate_file(path: Path, draw: random.Random) -> str:
    """Change a file's bytes and say how."""
    content, how = bytearray(path.read_bytes()), draw.choice(BYTES)
    how(content, draw)
    path.write_bytes(bytes(content))
    return f"{how.__name__.strip('_')} {path.name}"


def mutate(folder: Path, names: Sequence[str], outside: Path, number: int) -> str:
    """Do number ``number`` to one or two of these files of a folder, and say what.

    Args:
        folder: Where they are.
        names: Which may be changed.
        outside: A folder for what is moved away; its `mark` is made by what should not have run.
        number: Which mutation.
    """
    draw = random.Random(number)
    path, other = (folder / draw.choice(sorted(names)) for _ in range(2))
    away = outside / f"{number}-{path.name}"
    match draw.randrange(14):
        case 0:
            path.unlink()
            return f"no {path.name}"
        case 1:
            path.rename(away)
            path.symlink_to(draw.choice((away, outside / "nothing", Path("..") / path.name, path)))
            return f"a link for {path.name}"
        case 2:
            os.link(path, away)  # the same file by two names
            return f"a second name of {path.name}"
        case 3:
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return f"{path.name} and {other.name} exchanged"
        case 4 if path != other:
            path.unlink()
            os.link(other, path)
            return f"{other.name} for {path.name}"
        case 5:
            path.unlink()
            draw.choice((path.mkdir, lambda: os.mkfifo(path)))()
            return f"a folder or a pipe for {path.name}"
        case 6:
            acting = io.BytesIO()
            torch.save(Acts(outside / "mark"), acting)
            path.write_bytes(draw.choice((pickle.dumps(Acts(outside / "mark")), acting.getvalue())))
            return f"a program for {path.name}"
        case 7:
            shutil.copy(path, away)
            path.write_bytes(draw.choice((b"", b"\n", b"{}", draw.randbytes(300))))
            return f"something else for {path.name}"
        case _:
            return mutate_file(path, draw)


# ------------------------------------------------------------------ values


def _odd(draw: random.Random) -> Any:
    """A value of another kind than what is there, as `weights_only=True` would load it."""
    number = float(draw.choice((0, 1, -1, 2.5, float("nan"), float("inf"), 10**30)))
    return draw.choice(
        (
            *(None, True, False, "", "text", b"bytes", [], {}, (), {1, 2}, 10**400, -3, 7, number, complex(1, 1), [[]]),
            *(
                [None],
                {"a": 1},
                ["text"],
                {0: {}},
                OrderedDict(a=1),
                torch.float32,
                torch.device("cpu"),
                torch.Size([2]),
            ),
            *(torch.tensor(number), torch.full((3,), number), torch.ones(2, 3), torch.ones(0), torch.ones(2, 0, 3)),
            *(torch.ones(2, 2, device="meta"), torch.eye(3).to_sparse(), torch.tensor(True), torch.tensor(1 + 1j)),
            torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        )
    )


def _other_tensor(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same tensor in another form, or with other numbers."""
    tensor = tensor.detach().clone()
    match draw.randrange(9):
        case 0:
            return tensor.reshape(-1)
        case 1:
            return tensor.unsqueeze(0)
        case 2:
            return tensor[..., :-1] if tensor.ndim else tensor
        case 3:
            return tensor.mT if tensor.ndim > 1 else tensor.expand(2, *tensor.shape)
        case 4:
            return tensor.to(
                draw.choice((torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.bfloat16))
            )
        case 5:
            return tensor.fill_(draw.choice((float("nan"), float("inf"), -1.0)))
        case 6:
            return tensor.to("meta")
        case 7:
            return tensor.to_sparse()
        case _:
            return torch.nn.Parameter(tensor.float())


Place = tuple[Any, Any]
"""A dict or list, and a key or number in it."""


def _places(value: Any) -> list[Place]:
    """All places in a nest of dicts and lists, the outer ones first; each level of it is as likely as another."""
    places: list[Place] = []
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            places += [(value, key), *_places(value[key])]
    return places


def mutate_value(value: dict[str, Any] | list[Any], number: int) -> tuple[Any, str]:
    """Return a copy of nested dicts, lists and tensors with one or two places changed, and what was done."""
    draw, value, changes = random.Random(number), copy.deepcopy(value), []
    for _ in range(draw.choice((1, 1, 1, 2))):
        places = _places(value)
        if not places:
            break
        inside, key = draw.choice(places)
        other, other_key = draw.choice(places)
        old_value = inside[key]
        how = draw.choice(("drop", "odd", "odd", "rename", "double", "exchange", "tensor", "tensor", "tuple"))
        if how == "drop":
            del inside[key]
        elif how == "rename" and isinstance(inside, dict):
            new = draw.choice((None, 0, 99, "other", "step", "momentum", ("a",), str(key), "param_names"))
            inside[new] = inside.pop(key)
        elif how == "double" and isinstance(inside, list):
            inside.append(old_value)
        elif how == "exchange" and not _within(old_value, other) and not _within(other[other_key], inside):
            inside[key], other[other_key] = other[other_key], old_value
        elif how == "tensor" and isinstance(old_value, torch.Tensor):
            inside[key] = _other_tensor(old_value, draw)
        elif how == "tuple" and isinstance(old_value, list):
            inside[key] = tuple(old_value)
        else:
            how, inside[key] = "odd", _odd(draw)
        changes.append(f"{how} {key!r}")
    return value, ", ".join(changes)


def _within(outer: Any, container: Any) -> bool:
    """Whether a container is this value or lies in it."""
    return outer is container or any(inside[key] is container for inside, key in _places(outer))
