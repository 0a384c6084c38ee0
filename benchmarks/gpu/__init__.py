"""Measure and check on a GPU, in six minutes: `python -m benchmarks gpu [PART ...]`.

Each part runs in its own process, so that a part that hangs or crashes does not end the others. Figures are printed and
written as JSON. `--keep FILE` copies the figures of such a file, possibly from another machine, into
benchmarks/results.json and docs/project/benchmarks.md. Without a GPU every part runs with small sizes on the CPU, which
shows that the parts work and measures nothing.
"""
