"""The file that keeps how often experts were selected: whatever is damaged is ignored, and fills no memory."""

import os
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dsv4_jax.expert_pages.placement_file import read_frequencies


def npy(header, data=b""):
    """A member of an archive with a header of NumPy's format."""
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive(path, content, **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("first.npy", content)
    return bytearray(path.read_bytes())


def with_method(content, method):
    """An archive of one member, compressed by another method: the number stands in two headers."""
    content[8] = content[content.index(b"PK\x01\x02") + 10] = method
    return content


DAMAGES = {
    "a method of compression": lambda path: with_method(archive(path, npy("{}")), 99),
    "a header without end": lambda path: archive(path, npy("{'descr': '<f4', 'shape': (6,")),
    "a shape": lambda path: archive(path, npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**58},)}}")),
    "a dtype": lambda path: archive(path, npy("{'descr': '|O', 'fortran_order': False, 'shape': (6,)}")),
    "a bomb": lambda path: archive(
        path,
        npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**24},)}}", bytes(2**27)),
        compression=zipfile.ZIP_DEFLATED,
    ),
    "an array": lambda path: npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**58},)}}"),
    "JSON": lambda path: b'{"first": [1, 2, 3, 4, 5, 6]}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_ignored_and_fill_no_memory(tmp_path, caplog, damage):
    path = tmp_path / "placement.npz"
    path.write_bytes(DAMAGES[damage](path))
    tracemalloc.start()
    assert read_frequencies(path, 6) == {}
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert f"the placement of experts in {path} is ignored" in caplog.text


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    st.none() | st.integers(0, 400),
)
def test_mutated_files_are_read_or_ignored(tmp_path_factory, flips, length):
    path = tmp_path_factory.getbasetemp() / "mutated.npz"
    np.savez(path, first=np.arange(6, dtype=np.float32))
    content = bytearray(path.read_bytes())
    for position, value in flips:
        content[position % len(content)] = value
    path.write_bytes(content[:length])
    assert all(row.shape == (6,) for row in read_frequencies(path, 6).values())


def test_a_pipe_in_place_of_the_file_is_ignored(tmp_path, caplog):
    os.mkfifo(tmp_path / "placement.npz")
    assert read_frequencies(tmp_path / "placement.npz", 6) == {} and "it is no regular file" in caplog.text
