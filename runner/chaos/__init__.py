"""Test that a configuration survives being killed: `runner chaos`.

    plan.py           plan when each fault is injected, as a pure function of the seed
    watch.py          observe a run from outside, through its files
    target.py         inject faults into processes (slurm_target.py: into Slurm jobs)
    stage.py          control a run under faults, and decide when a fault may be injected
    faults.py         define the kinds of fault, and how a run must react to each
    drill.py          train the reference run and the runs under faults
    compare.py        compare two run directories, bit for bit
    report.py         report the result
    display.py        show the progress

The command line is in `runner.cli.chaos`. Nothing in this package trains. It starts the same `python -m runner`
processes as a user would.
"""
