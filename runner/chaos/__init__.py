"""Test that a configuration survives being killed: `runner chaos`.

    plan.py           when each fault is injected: a pure function of the seed
    watch.py          observe a run from outside, by its files
    target.py         the target of faults: a process (slurm_target.py: a job)
    stage.py          one run directory under faults, and when a fault may be injected
    faults.py         the kinds of fault, each with what it requires of the run
    drill.py          the reference run, the runs under faults
    compare.py        compare two run directories, bit for bit
    report.py, display.py   the output for people

The command line is in `runner.cli.chaos`. Nothing in this package trains. It starts the same `python -m runner`
processes as a user would.
"""
