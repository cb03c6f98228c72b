"""The disk of an image where there is no EC2: written as a file, prepared for its machine, brought back."""
