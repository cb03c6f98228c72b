"""EC2 instances of ours: launched, reached, given a deadline, and gone."""
