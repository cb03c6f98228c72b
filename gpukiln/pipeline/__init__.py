"""The way of an image from its plan to a proof: baked, booted, judged, told by its tags."""
