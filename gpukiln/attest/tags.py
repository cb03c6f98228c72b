"""Tags that tie SBOM and provenance to an AMI."""

SBOM_TAG, STATEMENT_TAG, KEY_TAG = ATTESTED_TAGS = (
    "gpukiln:sbom-digest",
    "gpukiln:provenance-digest",
    "gpukiln:provenance-key",
)
UNSIGNED = "none"
