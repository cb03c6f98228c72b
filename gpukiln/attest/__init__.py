"""What an image is made of and where it comes from: SBOM, provenance, signature, and their verification."""
