"""What README, CONTRIBUTING and docs say to do works: Python runs, commands and options exist, links lead somewhere."""

import contextlib
import functools
import io
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from dsv4_jax.cli import main


ROOT = Path(__file__).parents[2]
DOCS = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/api/*.md"), *ROOT.glob("docs/notes/*.md")]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS])
WITH_COMMANDS = [*PAGES, ROOT / "benchmarks" / "README.md"]
# Commands whose package has another name.
PACKAGES = {"lint-imports": "import-linter", "sphinx-build": "sphinx", "jupyter": "jupyterlab"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# They show what other tests check; README's example always runs.
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md" and blocks(p, "python")], ids=name)
def test_python_runs(page):
    scope = {"__name__": "page"}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), scope)


def test_every_block_has_a_language_that_is_checked():
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        for fence in fences[::2]:
            assert fence in ("python", "bash", "text") or fence.startswith("{"), (name(page), fence)


@pytest.mark.parametrize("page", [p for p in WITH_COMMANDS if blocks(p, "bash")], ids=name)
def test_commands_and_options_exist(page):
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            for command in line.partition(" #")[0].split("&&"):
                if words := shlex.split(command, comments=True):
                    check(words)


def check(words: list[str]) -> None:
    while "=" in words[0] or words[0] == "timeout":  # variables, and a command that runs another
        words = words[2:] if words[0] == "timeout" else words[1:]
    program, *arguments = words
    match program:
        case "uv":
            check_uv(arguments)
        case "dsv4-jax":
            # `bench` has subcommands.
            check_options(arguments, dsv4_jax_help(*arguments[: 2 if arguments[0] == "bench" else 1]))
        case "bash":
            assert (ROOT / arguments[0]).is_file(), words
        case "pip":
            assert arguments[0] == "install", words
        case "git":
            assert arguments[0] in ("clone", "add", "commit"), words
        case "cd":
            pass
        case _:
            pytest.fail(f"{words}: a command that this test does not know")


def check_uv(arguments: list[str]) -> None:
    assert arguments[0] == "run", arguments
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    extras = project["project"]["optional-dependencies"]
    installed = [*groups["lint"], *groups["test"]]
    arguments = arguments[1:]
    while arguments[0] in ("--group", "--extra"):
        known = groups if arguments[0] == "--group" else extras
        assert arguments[1] in known, arguments
        installed += known[arguments[1]]
        arguments = arguments[2:]
    tool, *options = arguments
    if tool == "dsv4-jax":
        return check(arguments)
    if tool == "python":
        assert (ROOT / options[0]).is_file(), arguments
        return None
    package = PACKAGES.get(tool, tool)
    assert any(re.match(rf"{package}\b", str(entry)) for entry in installed), f"{tool} is in none of the groups"
    for path in options:
        if re.fullmatch(r"(tests|notebooks|docs)(/[\w.*]+)*", path):
            assert list(ROOT.glob(path)), f"{path} does not exist"
    if shutil.which(tool):
        sub = options[0] if tool in ("ruff", "pyrefly", "pre-commit") else None
        check_options(options, tool_help(tool, sub))


def check_options(arguments: list[str], text: str) -> None:
    for option in arguments:
        if option.startswith("--nbmake") or option == "--overwrite":
            continue  # pytest knows them only where nbmake is installed
        if re.match(r"--?[a-z]", option):
            assert re.search(rf"(?<![\w-]){re.escape(option.split('=')[0])}(?![\w-])", text), f"unknown {option}"


@functools.cache
def dsv4_jax_help(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as stopped:
        main([*(word for word in command if not word.startswith("-")), "--help"])
    assert stopped.value.code == 0
    return out.getvalue()


@functools.cache
def tool_help(tool: str, sub: str | None) -> str:
    command = [tool, *([sub] if sub else []), "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


# dsv4.md cites files of other projects.
@pytest.mark.parametrize("page", [p for p in WITH_COMMANDS if p.name != "dsv4.md"], ids=name)
def test_paths_exist(page):
    for path in re.findall(
        r"`((?:tests|pallas_kernels|dsv4_jax|examples|scripts|notebooks)/[\w/.]+)`", page.read_text()
    ):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_pages_are_all_reachable():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in [*DOCS, *ROOT.glob("notebooks/*.ipynb")]:
        if page.name != "index.md":
            place = page.relative_to(ROOT).with_suffix("")
            place = place.relative_to("docs") if place.parts[0] == "docs" else place
            assert re.search(rf"^{place}$", index, re.MULTILINE), f"{place} is in no table of contents"
