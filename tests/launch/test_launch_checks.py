"""Errors of a submission, with Slurm's commands faked on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, runs, slurm

from launch import checks
from launch.slurm import SlurmLauncher

__all__ = ["runs", "slurm"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 2),
        ("2:00:00", 120),
        ("1-0", 1440),
        ("1-02:30", 1590),
        ("1-00:00:01", 1441),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: int | str, expected: int) -> None:
    assert checks.minutes(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "1h", "-5", "1-", "2 days", "1.5"])
def test_a_time_that_slurm_does_not_accept_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time that Slurm accepts"):
        checks.minutes(text)


def test_a_valid_submission_has_no_errors(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher(partition="low", time="2:00:00").check(runs) == []
    assert slurm.calls("sbatch") == ["sbatch --test-only"]
    assert not list(runs[0].iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "lwo"}, ("launcher.partition='lwo'", "did you mean 'low'", "low, high")),
        ({"time": "soon"}, ("launcher.time", "'soon'", "D-HH:MM:SS")),
        ({"time": "2-0"}, ("launcher.time=2-0", "'low'", "1-00:00:00")),
        ({"nodes": 0}, ("launcher.nodes=0", "1 or more")),
        ({"time": 1, "signal_delay_s": 60}, ("launcher.signal_delay_s=60", "1 to 59")),
        ({"mem": "4G", "mem_per_cpu": "1G"}, ("launcher.mem", "mutually exclusive")),
        ({"max_timeouts": 0}, ("launcher.max_timeouts=0", "1 or more")),
        ({"time": 0}, ("launcher.time=0", "1 minute or more")),
        ({"signal_delay_s": "soon"}, ("launcher.signal_delay_s=soon", "from 1 to 65535")),
        ({"setup": "module load cuda"}, ("launcher.setup='module load cuda'", "must be a list", "[module load cuda]")),
    ],
)
def test_an_error_is_one_line_and_nothing_is_submitted(
    slurm: FakeSlurm, runs: list[Path], options: dict[str, object], words: tuple[str, ...]
) -> None:
    errors = SlurmLauncher(**{"partition": "low", **options}).check(runs)  # type: ignore[arg-type]
    assert len(errors) == 1
    assert "\n" not in errors[0]
    assert all(word in errors[0] for word in words), errors[0]
    assert not slurm.calls("sbatch")


def test_all_errors_of_the_options_are_reported_at_once(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert len(SlurmLauncher(nodes=0, tasks_per_node=0, time="x").check(runs)) == 3


def test_what_slurm_itself_would_refuse_is_found_before_anything_is_submitted(
    slurm: FakeSlurm, runs: list[Path]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification\n")
    (error,) = SlurmLauncher(qos="fast").check(runs)
    assert error.endswith("Invalid qos specification")


def test_on_a_machine_without_slurm_the_error_names_the_login_node(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (error,) = SlurmLauncher().check(runs)
    assert "sbatch" in error
    assert "login node" in error


def test_a_controller_that_does_not_answer_is_an_error(slurm: FakeSlurm, runs: list[Path]) -> None:
    slurm.fails("scontrol_show_partition", "slurm_load_partitions error: Unable to contact slurm controller\n")
    (error,) = SlurmLauncher().check(runs)
    assert "Unable to contact slurm controller" in error


def test_a_sweep_larger_than_a_job_array_may_be_is_an_error(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert SlurmLauncher().check([tmp_path / str(index) for index in range(11)]) == []
    (error,) = SlurmLauncher().check([tmp_path / str(index) for index in range(12)])
    assert "12 runs" in error
    assert "11 tasks" in error


def test_a_folder_that_the_nodes_cannot_see_is_an_error(
    slurm: FakeSlurm, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.prints("scontrol_show_node", "NodeName=n1 NodeHostName=faraway\n")
    monkeypatch.setattr(checks, "file_system_of", lambda path: "ext4")
    (error,) = SlurmLauncher(partition="low").check(runs)
    assert str(runs[0].parent) in error
    assert "faraway cannot see it" in error
    assert SlurmLauncher(partition="low", check_folder=False).check(runs) == []


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert checks.file_system_of(tmp_path / "not" / "there", mounts) == "nfs4"
    assert checks.file_system_of(Path("/"), mounts) == "ext4"
