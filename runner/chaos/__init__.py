"""`python -m runner.chaos`: the proof that a configuration survives being killed.

    options.py   the command line; what is changed in the configuration, and said
    plan.py      which fault strikes when: a pure function of the seed
    watch.py     what can be seen of a run from outside, by its files
    moments.py   the moments at which a fault may strike
    faults.py    the kinds of fault, each with the answer it asks of the run
    victim.py    what is struck: a process (slurm.py: a job)
    drill.py     reference, faults, comparison, verdict
    compare.py   two run directories, bit for bit
    report.py, picture.py, display.py   what people see

Nothing here trains: the runs are `python -m runner` processes, as a user would start them.
"""
