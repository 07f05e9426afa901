"""The command line as a user meets it: a process with a status, standard output and standard error."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topg import __version__
from topg.cli.main import VERBS, main, verb_help

SOURCE = Path(__file__).parents[2] / "src"


def topg(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environ}
    command = [sys.executable, "-m", "topg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


def test_the_version() -> None:
    result = topg("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"topg {__version__}\n", "")


def test_help_lists_every_verb_with_its_line() -> None:
    result = topg("--help")
    assert result.returncode == 0
    for verb in VERBS:
        assert f"    {verb} " in result.stdout
        assert verb_help(verb) in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_module_of_three_parts(verb: str) -> None:
    module = importlib.import_module(f"topg.cli.{verb}")
    assert verb_help(verb) == module.HELP
    assert "\n" not in module.HELP
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_help_is_fast_and_imports_no_verb() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from topg.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.perf_counter() - start, *sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(SOURCE)}
    runs = [subprocess.run(command, capture_output=True, text=True, env=env, check=True).stderr for _ in range(3)]
    modules = set(runs[0].split()[1:])
    assert not modules & {f"topg.cli.{verb}" for verb in VERBS}
    assert not modules & {"numpy", "torch", "yaml", "tokenizers", "huggingface_hub"}
    assert min(float(run.split()[0]) for run in runs) < 0.3


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_explains_itself(verb: str) -> None:
    result = topg(verb, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: topg {verb}")


@pytest.mark.parametrize(
    "arguments", [(), ("nosuch",), ("pull",), ("pull", "--nosuch", "x"), ("--vers",), ("pull", "x", "--na", "y")]
)
def test_wrong_usage_is_status_two(arguments: tuple[str, ...]) -> None:
    result = topg(*arguments)
    assert result.returncode == 2
    assert "usage: topg" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pull", "nosuch"), "'nosuch' is no name of the catalogue (smollm2-135m, gemma3-270m)"),
        (("pull", "hf:nosuch"), "write hf:ORG/NAME"),
        (("pull", "smollm2-135m", "--name", "x"), "--name goes with a path only"),
        (("pull", os.devnull), "neither a .gguf file nor a folder"),
        (("generate", "nosuch", "--prompt", "x"), "no model is named 'nosuch'"),
    ],
)
def test_an_expected_error_is_one_line_and_status_one(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = topg(*arguments, TOPG_HOME=str(tmp_path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("topg: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_system_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = topg("pull", "smollm2-135m", TOPG_HOME=str(tmp_path / "file"))
    assert result.returncode == 1
    assert result.stderr.startswith("topg: error: ")
    assert "Not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_empty_home_is_an_error(tmp_path: Path) -> None:
    assert "TOPG_HOME is empty" in topg("pull", "smollm2-135m", TOPG_HOME="").stderr


def test_the_configuration_in_force_can_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "tuning.yaml"
    file.write_text("execution:\n  enable_flash_attn: true\n  max_batch_size: 2\n")
    result = topg(
        "generate", "nosuch", "--prompt", "x", "--config", str(file), "--no-enable-flash-attn", "--print-config",
        TOPG_MEMORY_PREALLOCATE="50%",
    )  # fmt: skip
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert "execution.enable_flash_attn: false  # --enable-flash-attn" in lines
    assert f"execution.max_batch_size: 2  # {file}, line 3" in lines
    assert "memory.preallocate: 50%  # TOPG_MEMORY_PREALLOCATE" in lines
    assert "memory.page_size: auto  # default" in lines


@pytest.mark.parametrize(
    "arguments",
    [("--max-batch-size", "0"), ("--max-batch-size", "1_0"), ("--page-size", "4"), ("--preallocate", "0.5")],
)
def test_a_wrong_value_of_a_flag_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = topg("generate", "nosuch", "--prompt", "x", *arguments)
    assert result.returncode == 2
    assert f"error: argument {arguments[0]}" in result.stderr


def test_a_wrong_configuration_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tuning.yaml"
    file.write_text("execution:\n  max_batch: 2\n")
    result = topg("generate", "nosuch", "--prompt", "x", TOPG_CONFIG=str(file))
    assert result.returncode == 1
    assert f"{file}, line 2: 'max_batch' is not a key" in result.stderr


def test_ctrl_c_is_status_130(tmp_path: Path) -> None:
    with (tmp_path / "held.lock").open("wb") as held:
        if sys.platform == "win32":
            pytest.skip("signals differ")
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        (tmp_path / "held.gguf").write_bytes(b"x")
        (tmp_path / "downloads").mkdir()
        (tmp_path / "held.lock").rename(tmp_path / "downloads" / "held.lock")
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "TOPG_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "topg", "pull", str(tmp_path / "held.gguf")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert process.stderr is not None
            assert "waiting for it" in process.stderr.readline()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = f"{sys.executable} -m topg pull --help | true; {sys.executable} -m topg --help | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert result.stderr == ""


def test_main_takes_its_arguments_and_returns_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nosuch"]) == 1
    assert capsys.readouterr().err.startswith("topg: error: ")
