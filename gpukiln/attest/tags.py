"""Tags that tie SBOM and provenance to an AMI."""

from gpukiln.clouds.tags import SBOM_TAG, STATEMENT_TAG

# the first two are imported from here by gpukiln/exports
__all__ = ["SBOM_TAG", "STATEMENT_TAG", "UNSIGNED"]
UNSIGNED = "none"
