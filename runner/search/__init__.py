"""Search for good settings: the points, the journal, and the choice of what to train next.

Imports neither torch nor Hydra.

A search consists of runs and a journal. A process that can train acquires the lease of the search for a moment, reads
the journal, records its next task there, and then trains it. No process lives as long as the search.
"""
