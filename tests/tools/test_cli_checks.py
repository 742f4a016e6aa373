"""What `muonmesh train` checks before any rank starts: what it reads, models, paths, memory and the lock."""

from __future__ import annotations

import ast
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonmesh.errors import FileError
from muonmesh.files import is_finite, write_text
from muonmesh.tools.cli import run_files, terminal
from muonmesh.tools.cli.corpus import Corpus, load_corpus_of, prepare_corpus, save_corpus_of
from muonmesh.tools.cli.model import check_model
from muonmesh.tools.cli.report import TIMES, cut_metrics, read_metrics, summarise
from muonmesh.tools.cli.run import _environment
from muonmesh.tools.cli.run_files import LOCK_FILE, first_failure, locked, make_room, record_failure
from muonmesh.tools.cli.run_settings import Settings, load_settings

COVERS = (
    "tools.cli.run_files.locked",
    "tools.cli.run_settings.load_settings",
    "tools.cli.model.check_model",
    "files.is_finite",
    "tools.cli.terminal.print_plainly",
)

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**9, 2**63, 10**400, -(10**400), 1.5, -0.0, 1e308]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["many", "muon", "both", "cpu", "fsdp", "7", "\0"]),
    st.lists(st.one_of(st.integers(0, 2), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
CORPUS = Corpus("somewhere", "ab", "text", 1, 300, 4, 5)


# --- settings and descriptions ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from([field.name for field in fields(Settings)]), value=ANYTHING, missing=st.booleans())
def test_settings_are_read_as_written_or_refused_by_the_name_of_file_and_field(
    run: Path, name: str, value: Any, missing: bool
) -> None:
    content = _content(run)
    if missing:
        del content[name]
    else:
        content[name] = value
    (run / "config.json").write_text(json.dumps(content))
    message = ""
    try:
        loaded = load_settings(run)
    except FileError as error:
        message = str(error)
    else:
        assert not missing
        default = next(field.default for field in fields(Settings) if field.name == name)
        value = tuple(value) if isinstance(value, list) else value
        assert getattr(loaded, name) == value
        assert isinstance(value, bool) == isinstance(default, bool)
    if message:
        assert "config.json" in message
        assert name in message or name.replace("_", "-") in message or "batch" in message or "warmup" in message


def _content(run: Path) -> dict[str, Any]:
    Settings(out=str(run)).save({"torch": "any"})
    content: dict[str, Any] = json.loads((run / "config.json").read_text())
    return content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "found a list; needed a JSON object, the settings of a run"),
        ("3", "found a number"),
        ("{" * 100_000, "not JSON"),
        ("\xff", "not text in UTF-8"),
        ('{"steps": 1, "steps": 2}', "'steps' is there twice"),
        ("{}", "found no object 'environment'"),
    ],
)
def test_a_broken_config_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=rf"config\.json: .*{re.escape(message)}"):
        load_settings(tmp_path)


def test_a_misspelt_setting_is_told(tmp_path: Path) -> None:
    content = _content(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**content, "warmpu": 3}))
    with pytest.raises(FileError, match=r"config\.json: found 'warmpu', which means nothing"):
        load_settings(tmp_path)


def test_settings_that_were_changed_after_the_run_had_begun_are_refused(tmp_path: Path) -> None:
    Settings(out=str(tmp_path)).save(_environment(Settings(out=str(tmp_path)), "7"))
    content = json.loads((tmp_path / "config.json").read_text())
    for changed in ({"seed": 7}, {"steps": 900}, {"model": "nano"}, {"data": ["elsewhere"]}):
        (tmp_path / "config.json").write_text(json.dumps({**content, **changed}))
        with pytest.raises(FileError, match=r"config\.json: found settings that were changed after the run had begun"):
            load_settings(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**content, "ranks": 4, "parallel": "ddp", "timeout": 9}))
    assert load_settings(tmp_path, out="moved") == Settings(out="moved", ranks=4, parallel="ddp", timeout=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 10**8}, "--steps 100000000: needed a whole number of at most 99999999"),  # a name of a checkpoint
        ({"vocab": 2**31 - 1}, "--vocab 2147483647: needed a whole number of at most 1048576"),  # the library aborts
    ],
)
def test_numbers_beyond_what_can_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(out="x", **values)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from([field.name for field in fields(Corpus)]), value=ANYTHING, missing=st.booleans())
def test_a_description_of_the_text_is_read_as_written_or_refused(
    run: Path, name: str, value: Any, missing: bool
) -> None:
    save_corpus_of(run, CORPUS)
    content = json.loads((run / "corpus.json").read_text())
    if missing:
        del content[name]
    else:
        content[name] = value
    (run / "corpus.json").write_text(json.dumps(content))
    if not missing and type(value) is type(getattr(CORPUS, name)) and (isinstance(value, str) or 0 <= value < 2**63):
        assert load_corpus_of(run) == replace(CORPUS, **{name: value})
    else:
        with pytest.raises(FileError, match=rf"corpus\.json(\['{name}'\]|: not JSON)"):
            load_corpus_of(run)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path]:
    """A text and the folder of its tokens."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(50):
        (text / f"{number}.txt").write_text(f"Document {number} counts to {number**2}. " * 20)
    return text, Path(prepare_corpus([str(text)], vocab=300, cache=tmp_path / "cache").directory)


def changed_bit(file: Path, content: bytes) -> None:
    file.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])


def pickled(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        np.save(stream, np.array([{"an": "object"}], dtype=object), allow_pickle=True)


LOST = r"train\.bin: .*; needed the \d+ tokens that corpus\.json tells of"
NO_TOKENIZER = r"tokenizer\.json: found .*; needed the tokenizer of the \d+ tokens beside it"
DAMAGED: dict[str, tuple[str, Callable[[Path, bytes], object], str]] = {
    "changed": ("train.bin", changed_bit, r"its tokens have changed since they were written\. Remove the folder"),
    "cut": ("train.bin", lambda file, content: file.write_bytes(content[:-10]), LOST),
    "gone": ("train.bin", lambda file, content: None, LOST),
    "pickled": ("train.bin", pickled, LOST),
    "pipe": ("train.bin", lambda file, content: os.mkfifo(file), LOST),
    **{
        f"tokenizer {text}": ("tokenizer.json", lambda file, content, text=text: file.write_text(text), NO_TOKENIZER)
        for text in ("", '{"model": 5}', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    },
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tokens_are_one_sentence(damage: str, prepared: tuple[Path, Path], tmp_path: Path) -> None:
    (text, folder), (name, spoil, message) = prepared, DAMAGED[damage]
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    spoil(folder / name, content)
    with pytest.raises(FileError, match=message):
        prepare_corpus([str(text)], vocab=300, cache=tmp_path / "cache").tokenizer()


def test_a_text_that_is_one_long_word_is_learnt_from_in_pieces(tmp_path: Path) -> None:
    """The time to learn from a word grows with its square, so a genome would take days; ordinary text has no such."""
    (tmp_path / "genome.txt").write_text("A" * 20_000)
    tokenizer = prepare_corpus([str(tmp_path / "genome.txt")], vocab=300, cache=tmp_path / "cache").tokenizer()
    assert max(map(len, tokenizer.get_vocab())) <= 1000
    assert tokenizer.pre_tokenizer.pre_tokenize_str("A" * 5000) == [("A" * 5000, (0, 5000))], "encoded whole"


# --- metrics ----------------------------------------------------------------------------------------------------------

STEP_DONE = {"run": "muon", "step": 1, "seconds": 1.0, "tokens": 1, "loss": 5.0, **dict.fromkeys(TIMES, 1.0)}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"step": 1}',
        '{"run": "sgd", "step": 1}',
        '{"run": "muon"}',
        '{"run": "muon", "step": 1.5}',
        '{"run": "muon", "step": true}',
        '{"run": "muon", "step": 1, "loss": NaN}',
        '{"run": "muon", "step": 1, "loss": "low"}',
        '{"run": "muon", "step": 1, "seconds": null}',
        '{"run": ["muon"], "step": 1}',
        *(json.dumps(STEP_DONE | wrong) for wrong in ({"step": 0}, {"step_seconds": 0.0})),
    ],
)
def test_a_damaged_line_of_metrics_is_told_by_its_number(line: str, tmp_path: Path) -> None:
    good = '{"run": "muon", "step": 0, "seconds": 0.0, "validation_loss": 5.0}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n{good}")
    for read in (read_metrics, summarise, lambda run: cut_metrics(run, "muon", 0)):
        with pytest.raises(FileError, match=r"metrics\.jsonl: line 2.*: found .*; needed .*Remove the line"):
            read(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == f"{good}{line}\n{good}", "as it was"


def test_a_step_without_its_times_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"run": "muon", "step": 7, "seconds": 1.0, "tokens": 1, "loss": 5.0}\n')
    with pytest.raises(FileError, match=r"line 1\[\'step_seconds\'\]: found nothing; needed a positive, finite number"):
        summarise(tmp_path)


# --- models -----------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 4, "intermediate_size": 128}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
IMPOSSIBLE: dict[str, tuple[Any, str]] = {
    "zero": ({**LLAMA, "hidden_size": 0}, "llama cannot be built .*ZeroDivisionError"),
    "negative": ({**LLAMA, "num_hidden_layers": -1}, "found num_hidden_layers -1; needed 1 to 10000"),
    "zero by another name": ({**GPT2, "n_embd": 0}, "gpt2 cannot be built .*ZeroDivisionError"),
    "text": ({**LLAMA, "hidden_size": "64"}, "'hidden_size' expected int, got str"),
    "true": ({**LLAMA, "hidden_size": True}, "'hidden_size' expected int, got bool"),
    "null": ({**LLAMA, "hidden_size": None}, "'hidden_size' expected int, got NoneType"),
    "heads": ({**LLAMA, "num_attention_heads": 3}, r"hidden size \(64\) is not a multiple of .* heads \(3\)"),
    "heads of gpt2": ({**GPT2, "n_head": 5}, "gpt2 cannot be built .*divisible"),
    "activation": ({**LLAMA, "hidden_act": "nope"}, "llama cannot be built from this configuration: KeyError: 'nope'"),
    "layers": ({**LLAMA, "num_hidden_layers": 10**9}, "found num_hidden_layers 1000000000; needed 1 to"),
    "width": ({**LLAMA, "hidden_size": 10**15}, "llama cannot be built .*Storage size calculation overflowed"),
    "list": ([LLAMA], "found a list; needed a JSON object, a transformers config.json"),
    "no type": ({"hidden_size": 64}, 'found no "model_type"'),
    "type": ({**LLAMA, "model_type": 3}, 'found no "model_type"'),
    "unknown type": ({**LLAMA, "model_type": "lama"}, "Unrecognized model identifier"),
    "not causal": ({"model_type": "t5"}, "t5 does not predict the next token"),
}


def settings_of(model: Path) -> Settings:
    return Settings(out="x", model=str(model), vocab=300, seq=32, parallel="ddp")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_model_that_cannot_be_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, message = IMPOSSIBLE[name]
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"--model.*{message}") as caught:
        check_model(settings_of(tmp_path / "model.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_what_older_versions_wrote_is_read(fields: dict[str, Any], tmp_path: Path) -> None:
    older = {"architectures": ["X"], "torch_dtype": "float32", "transformers_version": "4.0", "_name_or_path": "x"}
    older |= {"use_cache": True, "bos_token_id": 1, "top_k": 3, "task_specific_params": None, "n_ctx": 1024}
    (tmp_path / "model.json").write_text(json.dumps({**fields, **older}))
    assert check_model(settings_of(tmp_path / "model.json")).num_parameters() > 0


def test_embeddings_that_a_head_shares_are_sharded_with_the_whole_model(tmp_path: Path) -> None:
    """bert names its embeddings a block, and FSDP2 refuses a parameter in two groups."""
    from muonmesh.tools.cli.model import blocks_of, build_model, model_config

    config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "bert.json").write_text(json.dumps({**config, "intermediate_size": 128, "is_decoder": True}))
    model = build_model(model_config(str(tmp_path / "bert.json"), vocab=300, seq=32))
    assert {type(block).__name__ for block in blocks_of(model)} == {"BertLayer"}


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "first")
    (tmp_path / ".file.writing").mkdir()  # what it writes beside cannot be
    with pytest.raises(FileError, match=r"file: could not be written: Is a directory"):
        write_text(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"


def test_a_link_at_a_temporary_path_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write in the folder could have had another file of the user overwritten."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".file.writing").symlink_to(tmp_path / "mine")
    write_text(tmp_path / "file", "first")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "first"
    assert not (tmp_path / "file").is_symlink()


@given(value=ANYTHING)
def test_a_finite_number_is_one(value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    assert is_finite(value) == (number and abs(value) <= sys.float_info.max)


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_run_has_one_process_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with locked(run, option="--out"):
        (run / "config.json").write_text("{}")
        for option in ("--out", "--resume"):
            with pytest.raises(FileError, match=rf"{option} .*run: another process is training there"):
                locked(run, option=option).__enter__()
    with locked(run, option="--resume"):
        pass
    with pytest.raises(FileError, match=r"already there\. Write: --resume"):
        locked(run, option="--out").__enter__()
    assert (run / "config.json").read_text() == "{}"


def test_a_lock_of_a_dead_process_does_not_matter(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from muonmesh.tools.cli.run_files import locked\n"
        "with locked(Path(sys.argv[1]), option='--out'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert (tmp_path / "run" / LOCK_FILE).exists()
    with locked(tmp_path / "run", option="--out"):
        pass


def start(run: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    try:
        with locked(run, option="--out"):
            (run / "config.json").write_text("{}")
            answers.put("mine")
    except FileError:
        answers.put("not mine")


def test_of_many_starters_one_gets_the_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # what they do needs nothing of what threads may hold
    for number in range(10):
        barrier, answers = context.Barrier(6), context.SimpleQueue()
        starters = [
            context.Process(target=start, args=(tmp_path / f"run-{number}", barrier, answers)) for _ in range(6)
        ]
        for starter in starters:
            starter.start()
        assert sorted(answers.get() for _ in starters) == ["mine", *["not mine"] * 5]
        for starter in starters:
            starter.join()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "thesis")
    with pytest.raises(FileError, match="could not be written"):
        locked(tmp_path / "run", option="--resume").__enter__()
    assert not (tmp_path / "thesis").exists()


# --- failures and terminals -------------------------------------------------------------------------------------------


def test_an_error_is_written_into_the_room_that_was_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / run_files.FOLDER).mkdir()
    make_room(tmp_path, 2)
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, 1, FileError("the disk is full"))
    assert (tmp_path / run_files.FOLDER / "1").stat().st_size == run_files.ROOM
    assert first_failure(tmp_path) == "the disk is full"
    try:
        raise KeyError("é" * 3000)
    except KeyError as error:
        record_failure(tmp_path, 0, error)
    assert first_failure(tmp_path) == "the disk is full", "the other came of it"
    (tmp_path / run_files.FOLDER / "1").write_text('[1, "ti')  # a disk that was full
    message = first_failure(tmp_path)
    assert message is not None
    assert message.startswith("Traceback")
    assert "\n\nrank 0: KeyError: " in message


class Closed(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    stream = terminal.Lasting(Closed())
    stream.write("text")
    stream.flush()


def test_what_an_encoding_lacks_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    terminal.print_plainly()
    terminal.make_console().print("2 ranks × 3 – and é", soft_wrap=True)
    assert printed.getvalue() == b"2 ranks ? 3 ? and ?\n"


def test_a_closed_stdout_and_a_terminal_without_columns_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setenv("COLUMNS", "0")
    for stream in (None, printed):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.print_plainly()
        terminal.make_console().print("2 ranks", soft_wrap=True)
    assert printed.getvalue() == "2 ranks\n"


def test_brackets_in_a_path_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.make_console().print("runs/[/first] of [data]/*.txt", soft_wrap=True)
    assert capsys.readouterr().out == "runs/[/first] of [data]/*.txt\n"


def test_names_cannot_command_a_terminal_nor_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;title\x07\u202e\nwhole: yes"
    terminal.say(f"first {name}", "second\r")
    terminal.note(name)
    assert terminal.complain("train", name, "second", code=1) == 1
    printed = capsys.readouterr()
    shown = r"\x1b]0;title\x07\u202e\nwhole: yes"
    assert printed.out == f"first {shown}\nsecond\\r\n"
    assert printed.err == f"{shown}\nmuonmesh train: {shown}\nsecond\n"


def test_every_command_prints_by_what_escapes() -> None:
    """Only `say`, `complain` and `note` print text."""
    for path in sorted(Path(terminal.__file__).parent.glob("*.py")):
        calls = [call for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.Call)]
        printed = [ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] == "print"]
        assert path.name == "terminal.py" or printed in ([], ["print(versions())"]), path.name


def test_a_rank_without_torchrun_says_what_to_write() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    command = [sys.executable, "-m", "muonmesh.tools.cli.worker", "runs/x"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("found no RANK; needed torchrun. Or write: muonmesh train --resume RUN")
