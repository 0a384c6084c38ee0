"""Errors of a submission, with Slurm's commands faked on PATH."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, runs, slurm

from launch import checks, environment, scheduler
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


def test_a_setting_of_slurm_may_itself_have_settings(slurm: FakeSlurm, runs: list[Path]) -> None:
    """Settings contain settings on most clusters. Lines outside the table are no settings."""
    scheduled = "bf_window=1440,default_queue_depth=1000"
    text = (
        f"Configuration data as of 2026-01-01\nMaxArraySize            = 2\nSchedulerParameters     = {scheduled}\n\n"
    )
    slurm.prints("scontrol_show_config", text)
    assert scheduler.show_config() == {"MaxArraySize": "2", "SchedulerParameters": scheduled}
    assert SlurmLauncher(partition="low").launch(runs, "somewhere:attempt") == 0


def test_a_valid_submission_has_no_errors(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher(partition="low", time="2:00:00").check(runs) == []
    assert not slurm.calls("sbatch")
    assert not list(runs[0].iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "lwo"}, ("launcher.partition='lwo'", "did you mean 'low'", "low, high")),
        ({"time": "soon"}, ("launcher.time", "'soon'", "D-HH:MM:SS")),
        ({"time": "2-0"}, ("launcher.time=2-0", "'low'", "1-00:00:00")),
        ({"nodes": 0}, ("launcher.nodes=0", "from 1")),
        ({"nodes": 7}, ("launcher.nodes=7", "the 2 nodes of partition 'low'")),
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


def test_advice_of_sbatch_test_only_blocks_no_submission(slurm: FakeSlurm, runs: list[Path]) -> None:
    """`--test-only` refuses jobs that sbatch queues, because of too few undrained nodes or a reservation soon."""
    slurm.fails("sbatch_--test-only_", "allocation failure: Requested node configuration is not available\n")
    launcher = SlurmLauncher(partition="low")
    assert launcher.check(runs) == []
    assert launcher.launch(runs, "somewhere:attempt") == 0
    advice = launcher.examine(None)[-1]
    assert advice.level == "warning"
    assert "Requested node configuration is not available" in advice.text


# As Slurm 22.05 prints them.
NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=2.63 Gres=(null) \
NodeHostName=h RealMemory=4000 AllocMem=0 FreeMem=21160 State=IDLE TmpDisk=0 CfgTRES=cpu=2,mem=4000M,billing=2
NodeName=n2 CPUTot=8 Gres=gpu:a100:2(S:0-1),gpu:t4:1,shard:9 NodeHostName=h RealMemory=16000 State=DOWN+DRAIN \
Reason=Gres=gpu:9 RealMemory=99999 [root@2026-01-01]
"""


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ({"gpus_per_node": 3, "mem": "15.5G", "tasks_per_node": 4, "cpus_per_task": 2}, "UP", None),
        ({}, "DOWN", "partition low is DOWN: no job starts in it"),
        ({}, "DRAIN", "partition low is DRAIN"),
        ({"gpus_per_node": 4}, "UP", "4 GPUs, and no node of partition low has more than 3"),
        ({"gpus_per_task": 2, "tasks_per_node": 2}, "UP", "4 GPUs"),
        ({"mem": "16G"}, "UP", "16384 MB of memory, and no node of partition low has more than 16000"),
        ({"mem_per_cpu": "4001", "tasks_per_node": 4}, "UP", "16004 MB"),
        ({"mem_per_gpu": "6G", "gpus_per_node": 3}, "UP", "18432 MB"),
        ({"cpus_per_task": 9}, "UP", "9 CPUs, and no node of partition low has more than 8"),
    ],
)
def test_the_doctor_refuses_a_job_that_would_never_start(
    slurm: FakeSlurm, options: dict[str, Any], state: str, words: str | None
) -> None:
    """Slurm lets some of them wait for ever, and `sbatch --test-only` accepts them."""
    slurm.prints("scontrol_show_partition", f"PartitionName=low Default=YES Nodes=n[1-2] State={state} TotalNodes=2\n")
    slurm.prints("scontrol_show_node", NODES)
    last = SlurmLauncher(**options).examine(None)[-1]
    assert last.level == ("ok" if words is None else "error")
    assert (words or "Slurm would accept this job") in last.text


def test_invalid_sbatch_options_are_errors_for_the_doctor(slurm: FakeSlurm) -> None:
    slurm.fails("sbatch_--test-only_", "sbatch: error: Invalid generic resource (gres) specification\n")
    last = SlurmLauncher(additional={"gres": "gpu:1"}).examine(None)[-1]
    assert (last.level, "Invalid generic resource" in last.text) == ("error", True)


@pytest.mark.parametrize("name", ["%j", "50%", "a\\b", "a\nb"])
def test_a_path_that_slurm_would_expand_is_an_error(slurm: FakeSlurm, tmp_path: Path, name: str) -> None:
    (error,) = SlurmLauncher().check([tmp_path / "fine", tmp_path / name / "run"])
    assert repr(str(tmp_path / name))[1:-1] in error
    assert "\n" not in error


def test_without_slurm_the_error_names_the_login_node(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (error,) = SlurmLauncher().check(runs)
    assert "sbatch" in error
    assert "login node" in error


def test_a_controller_that_does_not_answer_is_an_error(slurm: FakeSlurm, runs: list[Path]) -> None:
    slurm.fails("scontrol_show_partition", "slurm_load_partitions error: Unable to contact slurm controller\n")
    (error,) = SlurmLauncher().check(runs)
    assert "Slurm does not answer" in error
    assert "Unable to contact slurm controller" in error
    assert "refuse" not in error


@pytest.mark.parametrize(
    ("partition", "time", "limit"),
    [
        ("DefaultTime=NONE MaxTime=UNLIMITED", None, "no time limit"),
        ("DefaultTime=NONE MaxTime=02:00:00", None, "120 min per attempt (MaxTime"),
        ("DefaultTime=00:30:00 MaxTime=02:00:00", None, "30 min per attempt (DefaultTime"),
        ("DefaultTime=00:30:00 MaxTime=02:00:00", 45, "45 min per attempt (launcher.time"),
    ],
)
def test_the_doctor_reports_the_limit_that_counts(
    slurm: FakeSlurm, partition: str, time: int | None, limit: str
) -> None:
    slurm.prints("scontrol_show_partition", f"PartitionName=low Default=YES {partition}\n")
    assert limit in SlurmLauncher(time=time).examine(1.0)[0].text


def test_notice_beyond_the_partitions_default_time_is_an_error(slurm: FakeSlurm, runs: list[Path]) -> None:
    slurm.prints("scontrol_show_partition", "PartitionName=low Default=YES DefaultTime=00:02:00 MaxTime=UNLIMITED\n")
    (error,) = SlurmLauncher(signal_delay_s=120).check(runs)
    assert "launcher.signal_delay_s=120" in error
    assert SlurmLauncher(signal_delay_s=119).check(runs) == []


@pytest.mark.parametrize("export", ["NONE", "HOME"])
def test_the_doctor_tries_the_environment_that_jobs_would_get(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, export: str
) -> None:
    monkeypatch.setenv("SBATCH_EXPORT", export)
    monkeypatch.setattr(environment, "IMPORTS", "import os; assert 'SECRET' not in os.environ; import missing_module")
    monkeypatch.setenv("SECRET", "1")
    (finding,) = [each for each in SlurmLauncher().examine(None) if each.text.startswith("environment")]
    assert finding.level == "error"
    assert "No module named 'missing_module'" in finding.text
    monkeypatch.setattr(environment, "IMPORTS", "import sys")
    (finding,) = [each for each in SlurmLauncher().examine(None) if each.text.startswith("environment")]
    assert finding.level == "ok"


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


PREEMPTING = {"PreemptType": "preempt/partition_prio", "KillWait": "30 sec"}
CANCELS = "preemption: partition low cancels jobs instead of requeueing them"
NO_GRACE = "preemption without a grace time: 30 s (KillWait) from the signal to the kill"


@pytest.mark.parametrize(
    ("partition", "config", "save_s", "findings"),
    [
        # The site preempts nobody, or not in this partition.
        ("PreemptMode=REQUEUE", {"PreemptType": "preempt/none"}, 1.0, [("ok", "preemption: none in partition low")]),
        ("PreemptMode=REQUEUE", {}, 1.0, [("ok", "preemption: none in partition low")]),
        ("PreemptMode=OFF GraceTime=60", PREEMPTING, 1.0, [("ok", "preemption: none in partition low")]),
        ("GraceTime=60", PREEMPTING, 1.0, [("ok", "preemption: none in partition low")]),
        # Without a grace time.
        (
            "PreemptMode=REQUEUE GraceTime=0",
            PREEMPTING,
            1.0,
            [("ok", "preemption: REQUEUE in partition low"), ("warning", NO_GRACE)],
        ),
        (
            "PreemptMode=SUSPEND,GANG",
            {**PREEMPTING, "KillWait": "5 sec"},
            None,
            [("ok", "preemption: SUSPEND in partition low"), ("warning", NO_GRACE.replace("30 s", "5 s"))],
        ),
        ("PreemptMode=CANCEL", {"PreemptType": "preempt/qos"}, 1.0, [("warning", CANCELS), ("warning", NO_GRACE)]),
        # With a grace time that is long enough for two saves, for one, or for none.
        (
            "PreemptMode=REQUEUE GraceTime=20",
            PREEMPTING,
            None,
            [
                ("ok", "preemption: REQUEUE in partition low"),
                ("ok", "preemption with a grace time of 20 s (GraceTime)"),
            ],
        ),
        *(
            (
                f"PreemptMode={mode} GraceTime=20",
                PREEMPTING,
                save_s,
                [
                    (said, CANCELS if mode == "CANCEL" else f"preemption: {mode} in partition low"),
                    (level, f"a save takes {save_s:.1f} s, the grace time of a preemption (GraceTime) is 20 s"),
                ],
            )
            for mode, said in (("CANCEL", "warning"), ("REQUEUE", "ok"), ("CHECKPOINT", "ok"))
            for save_s, level in ((10.0, "ok"), (10.1, "warning"), (20.0, "warning"), (20.1, "error"))
        ),
    ],
)
def test_the_doctor_explains_the_effect_of_a_preemption(
    partition: str, config: dict[str, str], save_s: float | None, findings: list[tuple[str, str]]
) -> None:
    row = scheduler.fields(f"PartitionName=low {partition}")
    found = checks._preemption_findings(row, config, save_s)
    assert [(each.level, each.text) for each in found] == findings
    assert all(each.remedy for each in found if each.level != "ok")
