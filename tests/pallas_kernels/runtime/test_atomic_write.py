"""Files that appear whole or not at all."""

import pytest

from pallas_kernels.runtime.atomic_write import atomic_write


def test_a_file_replaces_an_older_one_when_it_is_whole(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_nothing_but_the_older_file(tmp_path, error):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
