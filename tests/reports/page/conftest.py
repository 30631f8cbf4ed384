from pathlib import Path

import pytest

from page_doubles import trained


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three runs that were really done."""
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("fedproto", 0)):
        trained(folder / f"{method}-{seed}", method, seed)
    return folder
