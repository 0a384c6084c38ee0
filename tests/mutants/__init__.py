"""Small random changes of the code, each of which a test should notice: see docs/project/mutants.md."""
