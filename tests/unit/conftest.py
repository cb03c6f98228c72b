"""What several modules of unit tests share."""

import pytest

from tests.support.endpoint import serve


@pytest.fixture(scope="module")
def endpoint():
    """An EC2 endpoint without moto's thousand images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        with serve() as endpoint:
            yield endpoint
