"""What only a GPU can show, in six minutes: `python -m benchmarks gpu [PART ...]`.

Each part is a process of its own, so that one that hangs or crashes takes nothing with it. Figures are printed as they
come and written as JSON. `--keep FILE` puts the figures of such a file, which may be another machine's, into
benchmarks/results.json and docs/benchmarks.md. Without a GPU every part runs with small sizes on the CPU, which shows
that the parts work and measures nothing.
"""
