import pytest
from parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Four processes over Gloo."""
    pool = Pool(4)
    yield pool
    pool.close()
