"""Check the commit-msg hook: refused subjects, accepted subjects, and the call from git."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_pages import ROOT

SCRIPT = ROOT / ".ci" / "commit_subject.py"
faults = runpy.run_path(str(SCRIPT))["faults"]


@pytest.mark.parametrize(
    "message",
    [
        "Fix the order of phases",
        "Pass the clock to the lease\n\nA test can then move it.",
        f"Add {'x' * 68}",
        "Need two ranks\n# a comment of git",
        'Revert "Adds a flag."',
    ],
)
def test_good_subject_is_accepted(message: str) -> None:
    assert faults(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (f"Add {'x' * 69}", "73 characters"),
        ("Added a flag", "imperative"),
        ("Fixes the lease", "imperative"),
        ("Removing a flag", "imperative"),
        ("fix the lease", "capital"),
        ("#12: fix", "begins with ''"),
        ("Fix the lease.", "full stop"),
        ("Fix the lease\nand the fence", "not blank"),
    ],
)
def test_bad_subject_is_refused_with_the_remedy(message: str, fault: str) -> None:
    (found,) = faults(message)
    assert fault in found


def test_git_calls_the_hook_of_the_configuration(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = [hook for repo in config["repos"] for hook in repo["hooks"] if "commit-msg" in hook.get("stages", [])]
    assert "commit-msg" in config["default_install_hook_types"]
    entry = re.sub(r"^python", sys.executable, hook["entry"]).replace(".ci/", f"{ROOT}/.ci/")

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    git("init")
    file = tmp_path / ".git" / "hooks" / "commit-msg"
    file.write_text(f'#!/bin/sh\nexec {entry} "$1"\n')
    file.chmod(0o755)
    assert git("commit", "--allow-empty", "-m", "Added a flag").returncode == 1
    assert git("commit", "--allow-empty", "-m", "Add a flag").returncode == 0
