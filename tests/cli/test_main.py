"""The command line as a user meets it: a process with a status, standard output and standard error."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topg import __version__
from topg.cli.main import VERBS, main
from topg.cli.options import decimal_number, whole_number

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
    for verb, line in VERBS.items():
        assert f"    {verb} " in result.stdout
        assert line in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_module_of_two_parts(verb: str) -> None:
    module = importlib.import_module(f"topg.cli.{verb}")
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_help_imports_no_verb() -> None:
    code = (
        "import sys\n"
        "from topg.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(SOURCE)}
    modules = set(subprocess.run(command, capture_output=True, text=True, env=env, check=True).stderr.split())
    assert "topg.cli.main" in modules
    assert not modules & {f"topg.cli.{verb}" for verb in VERBS}
    assert not modules & {"numpy", "torch", "yaml", "tokenizers", "huggingface_hub"}


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
    assert "topg" in result.stderr
    assert result.stdout == ""
    assert not arguments or (": error: " in result.stderr and result.stderr.count("\n") == 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("genrate", "x"), "topg: error: there is no verb 'genrate'; did you mean 'generate'?"),
        (("--versoin",), "topg: error: there is no flag --versoin; did you mean '--version'?; see topg --help"),
        (("generate", "--promt", "x"), "topg generate: error: there is no flag --promt; did you mean '--prompt'?"),
        (("chat", "x", "--temprature=1"), "did you mean '--temperature'?; see topg chat --help"),
        (("chat", "x", "--zzz"), "topg chat: error: there is no flag --zzz; see topg chat --help"),
        (("pull",), "topg pull: error: the following arguments are required: MODEL; see topg pull --help"),
        (("pull", "x", "--evil\x1b[2J"), r"there is no flag --evil\x1b[2J"),
        (("pull", "smolm2-135m"), "did you mean 'smollm2-135m'?"),
        (("generate", "gema3-270m", "--prompt", "x"), "did you mean 'gemma3-270m'?"),
    ],
)
def test_a_misspelt_name_is_one_line_with_the_nearest(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = topg(*arguments, TOPG_HOME=str(tmp_path))
    assert result.returncode in (1, 2)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_stands_after_two_dashes_is_no_flag(tmp_path: Path) -> None:
    assert "'--nosuch' is no name of the catalogue" in topg("pull", "--", "--nosuch", TOPG_HOME=str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pull", "nosuch"), "'nosuch' is no name of the catalogue (smollm2-135m, gemma3-270m)"),
        (("pull", "hf:nosuch"), "write hf:ORG/NAME"),
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pull", ""), "argument MODEL: an empty text is not allowed"),
        (("pull", os.devnull, "--name="), "argument --name: an empty text is not allowed"),
        (("pull", os.devnull, "--name", "a/b"), "--name: 'a/b' is not a model name"),
        (("pull", "smollm2-135m", "--name", "x"), "--name goes with a path only"),
        (("convert", "", "out"), "argument SRC: an empty text is not allowed"),
        (("convert", "x", ""), "argument OUT: an empty text is not allowed"),
        (("generate", "", "--prompt", "x"), "argument MODEL: an empty text is not allowed"),
        (("generate", "x", "--prompt", "x", "--config="), "argument --config: an empty text is not allowed"),
        (("generate", "x", "--prompt", "x", "--config", os.devnull, "--print-config"), "pipe or device"),
        (("generate", "x", "--prompt", "x", "--top-p", "2"), "top_p is 2"),
        (("chat", "--print-config", "--max-batch-size", "600"), "raise prefill_chunk to 600"),
    ],
)
def test_a_wrong_value_of_an_argument_is_wrong_usage(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = topg(*arguments, TOPG_HOME=str(tmp_path))
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_system_is_one_line_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = topg("pull", "smollm2-135m", TOPG_HOME=str(tmp_path / "file" / "home"))
    assert result.returncode == 1
    assert result.stderr.startswith(f"topg: error: {tmp_path}/file/home")
    assert "a file stands where a folder is needed" in result.stderr
    assert "Errno" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_home_that_is_a_file_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = topg("pull", "smollm2-135m", TOPG_HOME=str(tmp_path / "file"))
    assert (result.returncode, "a file; name a folder" in result.stderr) == (2, True)


@pytest.mark.parametrize("variable", ["TOPG_HOEM", "TOPG_MAX_CONTEXT"])
def test_a_misspelt_variable_stops_every_verb(variable: str) -> None:
    for arguments in (("pull", "x"), ("plan", "x"), ("chat", "x")):
        result = topg(*arguments, **{variable: "1"})
        assert (result.returncode, f"{variable} is not a variable" in result.stderr) == (2, True)


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


@pytest.mark.parametrize("flag", ["--max-tokens", "--seed", "--threads", "--max-context", "--top-k"])
@pytest.mark.parametrize("number", ["1_0", "\u0663", "+3", " 3", "3 ", "03", "", "1e3"])
def test_whole_numbers_have_plain_digits(flag: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "nosuch", "--prompt", "x", flag, number])
    assert caught.value.code == 2
    assert f"argument {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1_0", "\u0663.5", "+3", " 3", "nan", "inf", "", "."])
def test_numbers_with_decimals_have_plain_digits(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "nosuch", "--prompt", "x", "--temperature", number])
    assert caught.value.code == 2
    assert "argument --temperature" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("-1", -1.0), ("0.70", 0.7), (".5", 0.5), ("1e-5", 1e-5)])
def test_numbers_with_decimals_are_read(text: str, number: float) -> None:
    assert decimal_number(text) == number


def test_the_largest_seed_is_a_whole_number() -> None:
    assert whole_number(str(2**64 - 1)) == 2**64 - 1


def test_the_configuration_can_be_shown_without_a_model() -> None:
    result = topg("generate", "--print-config", "--max-context", "9")
    assert result.returncode == 0
    assert "execution.max_context: 9  # --max-context" in result.stdout


def test_a_wrong_configuration_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tuning.yaml"
    file.write_text("execution:\n  max_batch: 2\n")
    result = topg("generate", "nosuch", "--prompt", "x", TOPG_CONFIG=str(file))
    assert result.returncode == 2
    assert f"{file}, line 2: 'max_batch' is not a key" in result.stderr


def test_ctrl_c_is_status_130(tmp_path: Path) -> None:
    with (tmp_path / "held.lock").open("wb") as held:
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
