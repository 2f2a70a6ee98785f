"""The layout of files with arrays of the cache: safetensors files of known shapes, which end in a SHA-256."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, write_header
from pallas_kernels.runtime.pytrees import named_leaves


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SUM_BYTES = hashlib.sha256().digest_size


class FileLayout:
    """The format of one kind of file: a header, arrays, a SHA-256.

    Attributes:
      kind: "block", "snapshot" or "request"; the files of a prefix cache have their kind as the extension.
      header: the bytes that every file begins with.
      nbytes: size of a file in bytes.
    """

    def __init__(self, kind: str, struct: Any, metadata: Mapping[str, str]):
        """Makes the header and computes the places of the arrays.

        Args:
          kind: see the class.
          struct: pytree of the shapes [layers, rows, ...] and dtypes of the arrays in one file. The arrays of n files
            together have shapes [layers, n * rows, ...].
          metadata: {name: text} for the header.
        """
        self.kind = kind
        self._structs, self._structure = jax.tree.flatten(struct)
        tensors = [TensorHeader(name, DTYPE_NAMES[x.dtype], x.shape) for name, x in named_leaves(struct).items()]
        self._offsets = np.cumsum([0, *(tensor.nbytes for tensor in tensors)]).tolist()
        self.header = write_header([*tensors, TensorHeader("sha256", "U8", (_SUM_BYTES,))], metadata)
        self.nbytes = len(self.header) + self._offsets[-1] + _SUM_BYTES

    def name(self, digest: bytes) -> str:
        """Returns the name of the file that belongs to a 32-byte digest."""
        return f"{digest.hex()}.{self.kind}"

    def pack(self, digests: Sequence[bytes], tree: Any) -> list[bytes]:
        """Returns the contents of n files.

        Args:
          digests: for each file the bytes that its SHA-256 covers in addition to the stored ones: the 32-byte digest
            of a cached block, or b"" for a request.
          tree: pytree of the NumPy arrays [layers, n * rows, ...] of all files.
        """
        leaves = list(zip(jax.tree.leaves(tree), [struct.shape[1] for struct in self._structs], strict=True))
        contents = []
        for i, digest in enumerate(digests):
            file_rows = [x[:, i * rows : (i + 1) * rows].tobytes() for x, rows in leaves]
            content = b"".join([self.header, *file_rows])
            contents.append(content + _checksum(digest, content))
        return contents

    def is_valid(self, digest: bytes, content: np.ndarray) -> bool:
        """Returns whether `content`, [nbytes] uint8, is an undamaged result of `pack` for this digest."""
        data = memoryview(content)
        return data[: len(self.header)] == self.header and data[-_SUM_BYTES:] == _checksum(digest, data[:-_SUM_BYTES])

    def unpack(self, contents: np.ndarray) -> Any:
        """Returns the arrays [layers, n * rows, ...] of the files with these contents, [n, nbytes] uint8."""
        data = contents[:, len(self.header) :]
        leaves = []
        for struct, (start, stop) in zip(self._structs, itertools.pairwise(self._offsets), strict=True):
            layers, rows, *sizes = struct.shape
            leaf = data[:, start:stop].view(struct.dtype).reshape(-1, *struct.shape)
            leaves.append(leaf.swapaxes(0, 1).reshape(layers, len(contents) * rows, *sizes))
        return jax.tree.unflatten(self._structure, leaves)


def _checksum(digest: bytes, content: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(digest)
    checksum.update(content)
    return checksum.digest()
