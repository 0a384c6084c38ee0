"""Questions about a data order: what a step consumed, what is left, what another batch shape would change."""
