"""The documentation cannot drift: docs/cli.md is the help, README commands parse, defaults are
the settings' own."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from reap.cli.app import app
from reap.planning import RECIPES, PlanSettings

ROOT = Path(__file__).parents[1]
COMMAND = get_command(app)
COMMANDS: dict[str, Any] = COMMAND.commands  # type: ignore[attr-defined]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "tools" / "write_cli_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(command: str) -> dict[str, Any]:
    return {param.name: param for param in COMMANDS[command].params}


def test_cli_page_is_what_help_prints() -> None:
    tool = load_tool()

    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

    assert written == tool.document(), "docs/cli.md is stale: run `make docs`"


def test_cli_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool()
    before = tool.document()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")

    assert tool.document() == before
    assert "\x1b" not in before


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_documented(command: str) -> None:
    assert COMMANDS[command].help
    assert f"\n## reap {command}\n" in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for param in COMMANDS[command].params:
        assert getattr(param, "help", None), f"reap {command}: {param.name} has no help"


@pytest.mark.parametrize("command", COMMANDS)
def test_summary_is_not_cut_off(command: str) -> None:
    listed = load_tool().help_text()

    assert f"{COMMANDS[command].help.splitlines()[0]}\n" in f"{listed}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_free_of_python_and_of_typed_defaults(command: str) -> None:
    shown = load_tool().help_text(command)

    flags = [line for line in shown.splitlines() if line.strip().startswith("--")]
    assert not [line for line in flags if "<" in line.split("  ")[1]]
    assert "default: (" not in shown and "default: None" not in shown
    for param in COMMANDS[command].params:
        if param.default not in (None, False) and not param.required:
            assert "default" not in param.help.lower(), f"{param.name}: typer shows the default"


def test_defaults_of_plan_are_those_of_its_settings() -> None:
    params = options("plan")

    assert {f.name for f in fields(PlanSettings)} <= params.keys()
    for field in fields(PlanSettings):
        # typer has None for an option that can be repeated and was not given.
        default = None if field.name == "keep" else field.default
        assert params[field.name].default == default


def test_defaults_of_calibrate_and_evaluate_are_those_of_their_settings() -> None:
    from reap.artifacts import Format
    from reap.calibrate import CalibrationSettings
    from reap.evaluate import EvaluationSettings

    calibrate, evaluate = options("calibrate"), options("evaluate")
    made = CalibrationSettings()

    for name in (
        "tokens",
        "sequence_length",
        "documents",
        "batch_tokens",
        "probe_tokens",
        "sensitivity",
        "sensitivity_tokens",
        "low_rounding",
    ):
        assert calibrate[name].default == getattr(made, name)
    assert tuple(map(Format.parse, calibrate["low"].default)) == made.low_formats
    for name in ("tokens", "sequence_length", "documents"):
        assert evaluate[name].default == getattr(EvaluationSettings(), name)


def test_help_of_plain_names_the_recipes_that_are_no_criteria() -> None:
    from reap.artifacts.saliency import CRITERIA

    for recipe in set(RECIPES) - set(CRITERIA):
        assert recipe in options("plan")["plain"].help


def command_lines(markdown: str) -> list[str]:
    """The `reap …` commands in the code blocks of a page, one for each."""
    found = []
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            tokens = _words(line.strip().removeprefix("$ "))
            part: list[str] = []
            for token in [*tokens, "&&"]:
                if token in ("&&", "||", "|", ";"):
                    if part and Path(part[0]).name == "reap":
                        found.append(shlex.join(["reap", *part[1:]]))
                    part = []
                else:
                    part.append(token)
    return found


def _words(line: str) -> list[str]:
    """Shell words; prompts and NAME=value before a command are dropped, output is no command."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return []
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    return words


def parse(line: str) -> None:
    """Parse without running. Raises typer's usage error."""
    arguments = shlex.split(line)[1:]
    try:
        with COMMAND.make_context("reap", arguments) as context:
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            name, command, rest = COMMAND.resolve_command(context, rest)  # type: ignore[attr-defined]
            with command.make_context(name, rest, parent=context):
                pass
    except Exception as error:
        # --help and --version end parsing with an exit.
        if type(error).__name__ != "Exit":
            raise


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINES = [
    pytest.param(line, id=f"{page.name}:{line}")
    for page in PAGES
    if page.name != "cli.md"
    for line in command_lines(page.read_text(encoding="utf-8"))
]


@pytest.mark.skipif(not LINES, reason="no page shows a command yet")
@pytest.mark.parametrize("line", LINES)
def test_documented_command_parses(line: str) -> None:
    parse(line)


def test_command_lines_are_found_in_code_blocks_only() -> None:
    page = """
`reap nothing` and reap plan here
```bash
$ reap calibrate MODEL && reap plan --budget 512GB  # two
LD_PRELOAD=x .venv/bin/reap export \\
  --out DIR | tee log
pip install reap
error: reap isn't this
```
"""
    assert command_lines(page) == [
        "reap calibrate MODEL",
        "reap plan --budget 512GB",
        "reap export --out DIR",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "reap nonsense",
        "reap plan --nope 1",
        "reap calibrate",
        "reap plan --context x",
        "reap merge a",
    ],
)
def test_wrong_command_line_does_not_parse(line: str) -> None:
    with pytest.raises(Exception) as caught:
        parse(line)

    assert type(caught.value).__name__ != "Exit"


@pytest.mark.parametrize("line", ["reap --version", "reap plan --help", "reap run R --json"])
def test_right_command_line_parses(line: str) -> None:
    parse(line)
