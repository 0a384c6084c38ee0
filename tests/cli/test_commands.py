"""How commands are found, what help, configs and completion print, and how every command ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reported import write_run

from runner import __main__ as entry
from runner.cli.base import completion
from runner.cli.base import help as usage
from runner.cli.base.commands import COMMANDS
from runner.config.composition import Composer
from runner.config.identity import flatten
from runner.errors import ExitStatus


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, *arguments]
    return subprocess.run(
        command_line, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


class TestShowing:
    """Commands that only print import neither torch nor numpy, and write nothing."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["--version"],
            ["data=mixture", "--cfg", "job"],
            ["--cfg", "job", "data=mixture", "--resolve", "-p", "sampler"],
            ["--info", "defaults", "experiment=smoke"],
            ["--cfg", "job", "--resolve"],
            ["--hydra-help"],
            ["-sc", "query=bash"],
            ["-sc", "install=bash"],
            ["help"],
            ["resume", "--help"],
            ["doctor", "--help"],
            ["phases.late.start_step=3", "--cfg", "job"],
        ],
    )
    @pytest.mark.slow
    def test_showing_works_from_any_directory_without_torch(self, tmp_path: Path, arguments: list[str]) -> None:
        program = (
            "import sys; from runner.__main__ import main; status = main(); "
            "heavy = {'torch', 'numpy', 'submitit'} & set(sys.modules); assert not heavy, heavy; sys.exit(status)"
        )
        done = python("-c", program, *arguments, cwd=tmp_path, COMP_LINE="runner data=m")
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert list(tmp_path.iterdir()) == []

    def test_help_imports_no_hydra(self, tmp_path: Path) -> None:
        done = python("-X", "importtime", "-m", "runner", "--help", cwd=tmp_path)
        assert "hydra" not in done.stderr
        assert "data=mixture sampler.temperature=0.7" in done.stdout

    @pytest.mark.slow
    def test_cfg_resolve_prints_the_config_to_be_frozen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert entry.run(["data=mixture", "seed=3", "--cfg", "job", "--resolve"]) == 0
        assert capsys.readouterr().out == Composer().compose(["data=mixture", "seed=3"]).text
        assert entry.run(["--cfg", "job", "--resolve", "-p", "train.batch_size"]) == 0
        assert capsys.readouterr().out == "16\n"

    def test_a_config_error_in_what_is_shown_is_one_line(self, tmp_path: Path) -> None:
        done = python("-m", "runner", "data=mixtrue", "--cfg", "job", cwd=tmp_path)
        assert done.returncode == ExitStatus.USAGE
        (line,) = done.stderr.splitlines()
        assert "did you mean 'mixture'?" in line

    def test_help_names_settings_and_groups_that_exist(self, tmp_path: Path) -> None:
        flat = flatten(Composer().compose([]).plain)
        section = usage.text().split("Settings")[1].split("Flags")[0].splitlines()[1:]
        names = [line.split()[0] for line in section if line.strip()]
        assert len(names) > 10
        assert [name for name in names if name not in flat] == []
        (tmp_path / "data").mkdir()
        (tmp_path / "data/mine.yaml").write_text("{}")
        assert "files, mine, mixture" in usage.text(usage.config_dirs(["-m", "--config-dir", str(tmp_path)]))
        assert "files, mine, mixture" in usage.text(usage.config_dirs([f"-cd={tmp_path}"]))


class TestDispatch:
    def test_help_lists_every_command(self) -> None:
        listed = usage.text().split("Commands")[1].split("Examples")[0]
        assert [line.split()[0] for line in listed.splitlines()[1:] if line] == list(COMMANDS)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_its_help_text(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert entry.run(["help", name]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: python -m runner {name} ")
        assert entry.run([name, "--help"]) == 0
        assert capsys.readouterr().out == printed

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["stauts"], ["'stauts'", "did you mean 'status'?", "key=value"]),
            (["help", "stauts"], ["did you mean 'status'?"]),
            (["--json", "status", "outputs"], ["must come first: python -m runner status --json outputs"]),
            (["seed=1", "resume"], ["must come first: python -m runner resume seed=1"]),
            (["--config-path", "conf"], ["--config-path", "python -m runner --help"]),
            (["-m", "--cfg", "job"], ["leave out -m"]),
            (["-sc", "install=tcsh"], ["bash, zsh or fish"]),
            (["resume", "--nosuch"], ["--nosuch", "python -m runner resume --help"]),
            (["doctor", "--nosuch"], ["--nosuch", "python -m runner doctor --help"]),
        ],
    )
    def test_a_mistake_is_one_error_line(
        self, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert entry.run(arguments) == ExitStatus.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert [word for word in words if word not in line] == []

    def test_a_value_of_a_flag_is_not_a_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert entry.run(["--cfg", "job", "--resolve", "-p", "checkpoints"]) == ExitStatus.USAGE
        assert "-p checkpoints: there is no checkpoints in the config" in capsys.readouterr().err

    def test_ctrl_c_ends_any_command_with_130(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(arguments: list[str]) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("runner.cli.look.status.main", interrupted)
        assert entry.run(["status"]) == 130
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("command", ["--help", "help status", "status outputs", "--cfg job", "-sc install=bash"])
    def test_a_closed_pipe_ends_a_command_quietly(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "outputs").mkdir()
        script = f"{sys.executable} -m runner {command} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("0\n", "")


class TestCompletion:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("runner sta", ["status"]),
            ("runner help do", ["doctor"]),
            ("runner data=mix", ["data=mixture"]),
            ("python -m runner data=mix", ["data=mixture"]),
            ("runner train.st", ["train.steps="]),
            ("runner data=mixture -m sampler.te", ["sampler.temperature="]),
            ("runner --config-n", ["--config-name"]),
            ("runner status --w", ["--watch"]),
            ("runner status outputs ", []),  # left to the shell, which completes files
            ("runner resume outputs/x --config-d", ["--config-dir"]),
            ("runner resume outputs/x train.st", ["train.steps="]),
            ("runner doctor launcher=sl", ["launcher=slurm"]),
        ],
    )
    def test_a_line_is_completed(self, line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMP_LINE", "")
        assert completion.candidates(line) == expected

    def test_groups_of_a_further_directory_are_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMP_LINE", "")
        (tmp_path / "data").mkdir()
        (tmp_path / "data/mine.yaml").write_text("{}")
        assert completion.candidates(f"runner --config-dir {tmp_path} data=mi") == ["data=mine", "data=mixture"]

    @pytest.mark.slow
    def test_bash_completes_the_text_after_the_equals_sign(self, tmp_path: Path) -> None:
        """Bash splits words at `=`, and replaces only the last part."""
        (tmp_path / "runner").write_text(f'#!/bin/sh\nexec {sys.executable} -m runner "$@"\n')
        (tmp_path / "runner").chmod(0o755)
        script = """
            eval "$(runner -sc install=bash)"
            COMP_LINE='runner data=mix' COMP_POINT=15 COMP_WORDS=(runner data = mix) COMP_CWORD=3
            _runner_complete; printf '[%s]' "${COMPREPLY[@]}"
            COMP_LINE='runner stat' COMP_POINT=11 COMP_WORDS=(runner stat) COMP_CWORD=1
            _runner_complete; printf '[%s]' "${COMPREPLY[@]}"
            eval "$(runner -sc uninstall=bash)"
        """
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, check=False
        )
        assert (done.stdout, done.stderr) == (b"[mixture ][status ]", b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ["rm", ""],
        ["mv", "", "new"],
        ["mv", "../run", ""],
        ["pin", ""],
        ["status", ""],
        ["report", ""],
        ["inspect", ""],
        ["evaluate", ""],
        ["archive", "", "a.tar"],
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `runner rm "$UNSET"` in a run directory."""
    write_run(tmp_path / "run")
    (tmp_path / "run" / "code.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "run")
    before = sorted(path.name for path in Path().iterdir())
    assert entry.run(arguments) == ExitStatus.USAGE
    assert re.match("error: (argument .* empty|pass one run directory|the new path is empty)", capsys.readouterr().err)
    assert sorted(path.name for path in Path().iterdir()) == before


def test_every_option_in_conf_is_explained() -> None:
    """Check that each option has a comment above it or in its line, in at least one of its files."""
    from runner.config.search_path import conf_dir

    explained, options = {"_target_"}, {}
    for path in conf_dir().rglob("*.yaml"):
        above = ""
        for line in map(str.strip, path.read_text().splitlines()):
            key, colon, value = line.partition(":")
            if colon and value.strip() and line[0] not in "#-":
                options[key] = path.name
                if "#" in value or above.startswith("#"):
                    explained.add(key)
            above = line
    assert len(options) > 60
    assert {key: file for key, file in options.items() if key not in explained} == {}


def test_ctrl_c_at_interpreter_shutdown_keeps_the_exit_status() -> None:
    """The names of a module are deleted after its signal handlers."""
    program = """
import os, signal, sys
from runner.system.signals import STOP
STOP.install()
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
late = Late()
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "")
