"""From an offer to a machine on which somebody works: launched, watched, put away, its home kept."""
