"""Read and write a run directory: paths, lease, attempt log, provenance of the code, submitted jobs."""
