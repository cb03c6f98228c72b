"""Errors that the embedded cloud answers before moto sees a request, in the form of the called service.

EC2 answers XML, the services with a JSON protocol (SSM, ECR) an error's type and message.
"""

import json
import re
from xml.sax.saxutils import escape

from gpukiln.catalog.regions import regions

# The credential scope of Signature Version 4: key, date, region, service, aws4_request.
SCOPE = re.compile(r"Credential=[^/]+/\d+/(?P<region>[^/]*)/(?P<service>[^/]*)/")
Refusal = tuple[int, str, bytes]  # status, content type, body


def refusal_of(authorization: str, status: int, code: str, message: str) -> Refusal:
    """An error in the protocol of the service that a request is signed for.

    Args:
        authorization: The request's Authorization header.
        status: The HTTP status.
        code: The error's code.
        message: The error's text.

    >>> signed = "AWS4-HMAC-SHA256 Credential=key/20261121/us-west-2/ssm/aws4_request"
    >>> refusal_of(signed, 401, "AuthFailure", "wrong key")[2]
    b'{"__type": "AuthFailure", "message": "wrong key"}'
    >>> refusal_of(signed.replace("ssm", "ec2"), 401, "AuthFailure", "wrong key")[1]
    'text/xml'
    """
    scope = SCOPE.search(authorization)
    if scope and scope["service"] != "ec2":
        body = json.dumps({"__type": code, "message": message})
        return status, "application/x-amz-json-1.1", body.encode()
    body = (
        f"<Response><Errors><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error></Errors>"
        "<RequestID>00000000-0000-0000-0000-000000000000</RequestID></Response>"
    )
    return status, "text/xml", body.encode()


def internal_error(authorization: str, message: str) -> Refusal:
    """The answer where a request failed inside the server."""
    return refusal_of(authorization, 500, "InternalError", message)


def unknown_region(authorization: str) -> Refusal | None:
    """The refusal of a request for a region that AWS does not have; None for other regions.

    AWS has no endpoint there; the texts are those of an endpoint of another region (aws-sdk-php issues 493,
    732; aws-sdk-js issue 4545).
    """
    scope = SCOPE.search(authorization)
    if scope is None or scope["region"] in regions():
        return None
    code = "AuthFailure" if scope["service"] == "ec2" else "InvalidSignatureException"
    message = f"Credential should be scoped to a valid region, not '{scope['region']}'."
    return refusal_of(authorization, 403, code, message)
