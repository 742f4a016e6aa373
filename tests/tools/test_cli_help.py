"""What every command has: short help, examples that are right, one style of errors, versions and completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from muonmesh.tools.cli import versions
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.terminal import shell_line

COVERS = (
    "tools.cli.app.commands",
    "tools.cli.versions",
    "tools.cli.terminal.shell_line",
)

COMMANDS = sorted(typer.main.get_group(app).commands)  # type: ignore[attr-defined]


def shown(*line: str, width: int = 80) -> str:
    result = CliRunner().invoke(app, list(line), env={"COLUMNS": str(width), "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def run_command(*line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muonmesh", *line]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_short_option_shows_help_that_fits_a_terminal_and_ends_in_examples(command: str) -> None:
    text = shown(*command.split(), "-h")
    assert text == shown(*command.split(), "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert f"muonmesh {command}".strip() in text.partition("Examples:")[2], f"{command}: give app.command an epilog"


@pytest.mark.parametrize(
    "line",
    ["--help", *(pytest.param(x, marks=pytest.mark.soak) for x in ("--version", "plan --model nano --mesh fsdp=2"))],
)
def test_output_that_a_full_disk_loses_is_told_and_output_that_nobody_reads_is_not(line: str) -> None:
    command = [sys.executable, "-m", "muonmesh", *line.split()]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "muonmesh: stdout could not be written: the disk is full. Free some space\n"
    assert (ended.returncode, ended.stderr) == (1, message)
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_example_names_options_that_there_are(command: str) -> None:
    examples = shown(*command.split(), "-h", width=200).partition("Examples:")[2].splitlines()
    for line in filter(None, map(str.strip, examples)):
        words = shlex.split(line.partition(" > ")[0])
        if words[0] == "torchrun":
            words = words[words.index("muonmesh") :]
        assert words[0] == "muonmesh", line
        help_text = shown(words[1], "-h", width=200).partition("Examples:")[0]
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"{re.escape(option)}\b", help_text), f"{line}: no {option}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("nothing",), "No such command 'nothing'."),
        (("plan",), "Missing option '--model'."),
        (("doctor", "--xyz"), "No such option: --xyz"),
        (("plan", "--model", "nano", "--mesh", "fsdp"), "muonmesh plan: --mesh fsdp: found 'fsdp'; "),
    ],
)
def test_a_wrong_line_is_told_on_stderr(line: tuple[str, ...], message: str) -> None:
    run = run_command(*line)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_an_interrupt_while_python_imports_ends_as_later_ones_do() -> None:
    interrupts = "class Finder:\n    def find_spec(self, name, *_):\n"
    interrupts += "        if name == 'muonmesh.tools.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
    program = f"import os, signal, sys\n{interrupts}sys.meta_path.insert(0, Finder())\n"
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it may be ignored where the tests run
    program += "from muonmesh.tools.cli import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_line_to_write_is_quoted_for_the_shell() -> None:
    assert shlex.split(shell_line("doctor", Path("a b'$(x)"))) == ["muonmesh", "doctor", "a b'$(x)"]


def test_the_version_is_that_of_the_package_and_of_torch() -> None:
    assert run_command("--version").stdout == versions() + "\n"
    assert "muonmesh --version" in shown("-h")
    assert f"torch {torch.__version__.partition('+')[0]}" in versions()  # the installed package may not name its build


def test_a_shell_completes_commands_and_options() -> None:
    script = run_command("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_MUONMESH_COMPLETE=complete_bash" in script.stdout, script.stderr
    for typed, position, completion in (("muonmesh do", "1", "doctor"), ("muonmesh plan --mes", "2", "--mesh")):
        run = run_command(_MUONMESH_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=position)
        assert run.stdout.split() == [completion], run
