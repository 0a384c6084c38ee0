"""Bring back faults that this project had, or nearly had, one at a time, to check that the simulation finds them.

A scenario's faults are the `FAULTS` of the module here with the scenario's name. `python -m simulation.brought_back`
plays them: see `__main__`.
"""

from __future__ import annotations

from simulation.brought_back import custody, jobs, lease, search, training

FAULTS = {
    fault.name: fault
    for faults in (lease.FAULTS, training.FAULTS, jobs.FAULTS, search.FAULTS, custody.FAULTS)
    for fault in faults
}
"""All faults by name."""

RARE = frozenset(
    """
    check-first not-exclusive
    commit-without-fence deletion-without-fence refused-sync-again retention-counts-corrupt success-too-early
    tensors-not-verified evaluated-twice
    any-job earlier-start-takes-over asks-once no-timer one-verdict requeues-cancelled same-id-same-job no-notes
    no-lease-of-submissions
    moved-twice custody-not-looked-at-again taken-for-deleted deletion-not-fenced job-remembered-missing
    """.split()
)
"""Faults that took a search more than 500 schedules. The suite has separate tests for them.

A schedule that finds such a fault becomes another story when the code makes one more call, and a new search may find
nothing.
"""
