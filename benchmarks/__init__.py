"""Speed as ratios, each taken in one run against the peer or the limit it names."""
