"""What a run directory contains: paths, the lease, the attempt log, the code's provenance, submitted jobs."""
