"""The program as a whole: help, arguments that do not parse, and how it ends."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dsv4_jax
from dsv4_jax.cli import bench_command as bench, main
from dsv4_jax.cli.convert_command import ConvertCommand
from dsv4_jax.cli.generate_command import GenerateCommand
from dsv4_jax.cli.options import MINIMUMS
from dsv4_jax.cli.plan_command import PlanCommand
from dsv4_jax.cli.score_command import ScoreCommand
from dsv4_jax.cli.serve_command import ServeCommand
from dsv4_jax.cli.startup import use_compilation_cache


COMMANDS = {
    "generate": GenerateCommand,
    "serve": ServeCommand,
    "score": ScoreCommand,
    "convert": ConvertCommand,
    "plan": PlanCommand,
    "bench ops": bench.OpsBench,
    "bench layer": bench.LayerBench,
    "bench model": bench.ModelBench,
    "bench prefill": bench.PrefillBench,
    "bench serve": bench.ServeBench,
    "bench all_reduce": bench.AllReduceBench,
}


def words(text):
    """The text without line breaks and the lines of boxes, which depend on the terminal."""
    return " ".join(re.sub("[│╭╮╰╯─|]", " ", text).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_and_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"For example:\n  dsv4-jax {name}" in out
    positional = {"convert": 2, "bench ops": 1}.get(name, 0)
    assert out.count("\n  --") + out.count("│ --") == len(dataclasses.fields(COMMANDS[name])) - positional
    # An explanation stands between an option and its default.
    assert not re.findall(r"--[\w-]+(?: \S+)? \((?:default|required)", words(out))


def test_every_minimum_is_an_options():
    options = {field.name for command in COMMANDS.values() for field in dataclasses.fields(command)}
    assert MINIMUMS.keys() <= options


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("generate", "serve", "score", "convert", "plan", "bench"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "{generate, serve, chat, score, convert, plan, bench}"),
        (["bench"], "{ops, layer, model, prefill, serve, all_reduce}"),
        (["bench", "ops", "sort"], "sort"),
        (["bench", "ops", "append", "--plot", "x.png"], "--plot"),
        (["bench", "ops", "append", "--mesh", "model=2"], "--mesh"),
        (["bench", "ops", "append", "--expert-parallel"], "--expert-parallel"),
        (["bench", "layer", "--layers", "2"], "--layers"),
        (["bench", "all_reduce"], "--mesh"),
        (["generate", "--cache-format", "v5"], "invalid choice 'v5' for argument '--cache-format'"),
        (["generate", "--dtype", "float16"], "('float32', 'bfloat16')"),
        (["generate", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["score", "--ids", "ids.npy"], "--checkpoint"),
        (["plan", "--config", "v4_flash", "--memory", "80GiB"], "--context"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in words(err)


def start(*arguments, **variables):
    """The program in a process of its own, with more environment variables."""
    command = [sys.executable, "-c", "import sys; from dsv4_jax.cli import main; sys.exit(main())", *arguments]
    environment = os.environ | variables
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_version(run):
    assert run("--version") == f"dsv4-jax {dsv4_jax.__version__}\n"


def test_help_imports_neither_jax_nor_numpy():
    """Both take longer than all the rest."""
    code = "import sys, dsv4_jax; from dsv4_jax.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(*sys.modules.keys() & {'jax', 'numpy', 'flax'})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "dsv4-jax" in out and out.splitlines()[-1] == ""


def test_it_says_at_once_what_takes_long_and_ends_quietly_at_ctrl_c():
    process = start("generate")
    assert process.stderr.readline().startswith("Starting JAX and reading ")
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "") and process.returncode == 130


def test_it_ends_quietly_when_nobody_reads():
    process = start("plan", "--help")
    process.stdout.close()
    assert process.wait() == 141 and process.stderr.read() == ""
    process.stderr.close()


def test_a_gpu_that_is_not_there_is_explained_in_a_sentence():
    process = start("generate", JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    out, err = process.communicate()
    assert process.returncode == 2 and out == ""
    assert "Error: JAX_PLATFORMS=cuda asks for devices that JAX does not find here." in err
    assert "AssertionError" not in err


def test_compiled_programs_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    elsewhere = str(tmp_path / "elsewhere")
    for given, expected in [(None, str(tmp_path / "dsv4_jax" / "programs")), (elsewhere, elsewhere), ("", "")]:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", given or "")
        if given is None:
            monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        use_compilation_cache()
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == expected
        assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"


@pytest.mark.parametrize("problem", ["a file", "another user", "writable"])
def test_a_cache_that_others_may_write_is_not_used(monkeypatch, tmp_path, capsys, problem):
    """Its files are code that JAX loads and runs."""
    folder = tmp_path / "programs"
    folder.mkdir(0o700)
    for name in ("DSV4_JAX_PROGRAMS", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    if problem == "a file":
        folder.rmdir()
        folder.touch()
    elif problem == "another user":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.chmod(0o775)
    use_compilation_cache()
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false" and not jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)  # as tests/programs.py sets it
    assert "DSV4_JAX_PROGRAMS" not in os.environ
    reason = {"a file": "File exists", "another user": "it belongs to another user", "writable": "others may write"}
    err = " ".join(capsys.readouterr().err.split())
    assert f"Compiled programs are not kept in {folder}: {reason[problem]}" in err


def test_jax_is_told_of_the_cache_if_it_has_started(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    for name in ("JAX_COMPILATION_CACHE_DIR", "DSV4_JAX_PROGRAMS", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    settings = ("enable_compilation_cache", "compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in settings}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.jit(lambda x: x + 1)(1)  # JAX has noted that there is no cache
    try:
        use_compilation_cache()
        programs = tmp_path / "dsv4_jax" / "programs"
        assert os.environ["DSV4_JAX_PROGRAMS"] == str(programs / "steps")
        jax.jit(lambda x: x + 2)(1)
        assert list(programs.glob("*-cache"))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
