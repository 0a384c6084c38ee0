"""Faults that this project once had, or nearly had, brought back one at a time, to see that the simulation finds them.

A scenario's faults are the `FAULTS` of the module here with the scenario's name. `python -m simulation.brought_back`
plays them: see `__main__`.
"""

from __future__ import annotations

from simulation.brought_back import custody, jobs, lease, training

FAULTS = {
    fault.name: fault for faults in (lease.FAULTS, training.FAULTS, jobs.FAULTS, custody.FAULTS) for fault in faults
}
"""All of them, by name."""
