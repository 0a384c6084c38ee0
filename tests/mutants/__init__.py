"""Small random changes of the code, each of which some test should notice: see docs/project/mutants.md."""
