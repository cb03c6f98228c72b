"""From an offer to a machine on which somebody works: launched, watched, removed, its home kept."""
