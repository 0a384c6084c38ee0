"""What training records: metrics, timings, profiles, and its entries in the train state."""
