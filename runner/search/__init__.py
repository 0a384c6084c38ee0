"""Search for good settings: define the points, keep the journal, and choose what to train next.

Imports neither torch nor Hydra.

A search consists of runs and a journal. A process that is ready to train briefly acquires the lease of the search,
reads the journal, and records its next task there. Then it trains that task. No process has to live as long as the
search.
"""
