"""Faults that this project once had, or nearly had, brought back one at a time, to see that the simulation finds them.

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
"""All of them, by name."""

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
"""Those that took a search more than 500 schedules: the suite leaves them to tests of their own.

A schedule that finds one becomes another story as soon as the code makes one call more, and the search for the next
one may come to nothing.
"""
