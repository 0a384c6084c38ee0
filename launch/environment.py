"""Check and set the environment of a job's processes, which may differ from the command's environment."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess

from runner.contracts import Finding
from runner.system import processes

IMPORTS = "import submitit, launch.job, runner.training.attempt"
IMPORT_TIMEOUT_S = 120


def environment_lines() -> list[str]:
    """Return batch script lines that pass the script's environment to srun's tasks.

    With SBATCH_EXPORT=NONE, a common site default, tasks would get no variables, not even Slurm's. The lines also keep
    this command's module search path, so that the job finds the same modules.
    """
    lines = ["export SLURM_EXPORT_ENV=ALL"]
    if path := processes.environment.get("PYTHONPATH"):
        absolute = os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep))
        lines.append(f'[ -n "${{PYTHONPATH:-}}" ] || export PYTHONPATH={shlex.quote(absolute)}')
    if trusted := processes.environment.get("RUNNER_TRUST"):
        lines.append(f"export RUNNER_TRUST={shlex.quote(trusted)}")
    return lines


def examine_environment(export: str, python: str) -> Finding:
    """Check whether Python finds its modules in the environment of a job submitted with --export=`export`.

    Args:
        export: ALL, NIL, NONE, or a list of variables.
        python: command that starts Python, quoted for the shell.
    """
    if "ALL" in export.split(","):
        return Finding("ok", "environment: jobs get that of the command (--export=ALL)")
    user = pwd.getpwuid(processes.user_id())
    login = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    script = "\n".join([*environment_lines(), f"{python} -c {shlex.quote(IMPORTS)}"])
    where = f"environment: jobs get that of a login (--export={export})"
    remedy = "set what is missing in launcher.setup, or unset SBATCH_EXPORT"
    try:
        done = processes.run(
            ["/bin/bash", "-l", "-c", script],
            env=login,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("warning", f"{where}, in which Python does not start in {IMPORT_TIMEOUT_S} s", remedy)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Finding("error", f"{where}, in which Python fails: {lines[-1]}", remedy)
    return Finding("ok", f"{where}, in which Python finds its modules")
