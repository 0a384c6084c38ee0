"""Access files, the clock, processes, signals and other ranks. All side effects go through this package."""
