"""Release: copy a proven image, share it, point a channel at it, go back, and remove what is not needed."""
