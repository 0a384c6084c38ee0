"""Check that the projects in docs/examples are bit-identical after kills."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, Run, assert_same_run

EXAMPLES = ROOT / "docs" / "examples"
SMALLER = {
    "gan": [],
    "hugging_face": ["model.config.n_embd=16", "model.config.n_layer=1"],
    "images": ["data.sources.shapes.count=60"],
    "policy_gradient": ["task.longest=20"],
    "regression": [],
}
DRAWN = {"gan": "points-00000020.png", "hugging_face": "three-00000020.txt", "images": "predictions-00000020.png"}
STEPS = 40


# On two ranks: a custom sampler, metric and training step.
CASES = [(name, 1, 10) for name in SMALLER if name != "images"] + [
    (name, 2, 4) for name in ("gan", "images", "regression")
]
SHOWN = pytest.mark.promise("an example with random augmentation, killed ten times: bit for bit the same")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "ranks", "kills"),
    [pytest.param("images", 1, 10, marks=SHOWN), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_an_example_that_is_killed_is_bit_identical(name: str, ranks: int, kills: int, tmp_path: Path) -> None:
    """Draw zero or two workers for each attempt. The undisturbed run has none."""
    project = tmp_path / name
    shutil.copytree(EXAMPLES / name / "conf", project / "conf")
    shutil.copy(EXAMPLES / name / f"{name}.py", project)
    words = [
        "--config-dir",
        "conf",
        f"experiment={name}",
        f"train.steps={STEPS}",
        f"train.batch_size={8 // ranks}",
        "checkpoint.every_steps=5",
        "eval.every_steps=20",
        "run.threads=1",
        "logger=none",
        *SMALLER[name],
    ]
    script = ROOT / "tests" / "support" / "forked.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(ranks), str(kills), "0", *words],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain, killed = Run(tmp_path / "plain", []), Run(tmp_path / "killed", [])
    assert_same_run(plain, killed)
    assert len(plain.lines()) == STEPS + STEPS // 20
    if name in DRAWN:
        files = [run.path / "artifacts" / DRAWN[name] for run in (plain, killed)]
        assert files[0].read_bytes() == files[1].read_bytes()
