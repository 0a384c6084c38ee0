"""A simulated world for the real code: files, clocks, processes and a scheduler, all driven by one seed.

`engine` runs processes step by step, `disk` keeps their files, `doors` puts both in place of the system layer. A
scenario defines the processes, the possible strikes, and the promises to check. See docs/project/simulation.md.
"""
