"""A search for good settings: its points, its journal, and what is to be trained next. Imports neither torch nor Hydra.

A search is runs and a journal. Whoever has time to train takes the lease of the search for a moment, reads the journal,
adds what it is going to do, and does it: there is no process that lives as long as the search.
"""
