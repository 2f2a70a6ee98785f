"""Pages of the CPU that can be mapped and moved as `CudaMemory`'s are: files of memory, and mmap."""

import ctypes
import mmap
import os
import threading

from dsv4_jax.expert_pages import CudaMemory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10


class CpuMemory(CudaMemory):
    """A GPU with `device_bytes` and a host with `host_bytes` of memory, on the CPU. Every misuse is an assertion.

    Attributes:
      ranges: {address: bytes} of reserved addresses.
      handles: {handle: (bytes, whether they are the host's)}.
      mapped: {address: handle}.
      copied: bytes copied so far.
    """

    page = mmap.PAGESIZE

    def __init__(self, device_bytes=1 << 40, host_bytes=1 << 40):
        self.room = {False: device_bytes, True: host_bytes}
        self.ranges = {}
        self.handles = {}
        self.mapped = {}
        self.copied = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes):
        address = self._mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.ranges[address] = nbytes
        return address

    def unreserve(self, address, nbytes):
        assert self.ranges.pop(address) == nbytes
        assert not [a for a in self.mapped if address <= a < address + nbytes]
        assert _libc.munmap(address, nbytes) == 0

    def create(self, nbytes, *, on_host):
        with self._lock:
            if self.room[on_host] < nbytes:
                raise MemoryError(f"no {nbytes} bytes on the {'host' if on_host else 'GPU'}")
            self.room[on_host] -= nbytes
            handle = os.memfd_create("pages")
            os.ftruncate(handle, nbytes)
            self.handles[handle] = nbytes, on_host
            return handle

    def release(self, handle):
        assert handle not in self.mapped.values()
        nbytes, on_host = self.handles.pop(handle)
        self.room[on_host] += nbytes
        os.close(handle)

    def map(self, address, nbytes, handle, *, for_cpu=False):
        assert self.handles[handle][0] == nbytes and address not in self.mapped
        assert self.handles[handle][1] or not for_cpu
        self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle)
        self.mapped[address] = handle

    def unmap(self, address, nbytes):
        del self.mapped[address]
        self._mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)

    def free_bytes(self):
        return self.room[False]

    def free_host_bytes(self):
        return self.room[True]

    def copy(self, target, source, nbytes):
        ctypes.memmove(target, source, nbytes)
        self.copied += nbytes

    def synchronize(self):
        pass

    def _mmap(self, *args):
        address = _libc.mmap(*args, 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return address

    def is_empty(self):
        """Whether everything was given back."""
        return not (self.ranges or self.handles or self.mapped)


def whole_pages(nbytes):
    """The bytes of the pages that so many bytes take."""
    return -(-nbytes // CpuMemory.page) * CpuMemory.page
