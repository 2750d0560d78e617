"""A weight bucket on its way from the adapter to vLLM's worker processes."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljob_trainer.sync.buckets import Bucket, TensorEntry
from rljob_trainer.sync.device_memory import DeviceMemory


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a bucket in memory shared between processes of this machine: a file of `/proc/<pid>/fd`."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class Payload:
    """What one worker receives instead of a `Bucket`, whose host bytes would be copied through a socket."""

    entries: list[TensorEntry]
    memory: HostMemory | DeviceMemory

    def open(self, device_index: int) -> Bucket:
        """The bucket as this process sees it; valid for as long as its tensors are referenced."""
        if isinstance(self.memory, DeviceMemory):
            return Bucket(self.entries, self.memory)
        if not self.memory.num_bytes:
            return Bucket(self.entries, np.zeros(0, dtype=np.uint8))  # an empty file cannot be mapped
        with Path(self.memory.path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), self.memory.num_bytes, prot=mmap.PROT_READ)
        return Bucket(self.entries, np.frombuffer(mapped, dtype=np.uint8))


def build_payload(bucket: Bucket, descriptors: list[int]) -> Payload:
    """Host bytes go to a file without a name: it cannot outlive both processes."""
    if isinstance(bucket.data, DeviceMemory):
        return Payload(bucket.entries, bucket.data)
    descriptor = os.memfd_create("rljob-weights", os.MFD_CLOEXEC)
    descriptors.append(descriptor)
    data = np.ascontiguousarray(bucket.data).data
    written = 0
    while written < len(data):  # one write call moves at most 2 GiB
        written += os.write(descriptor, data[written:])
    return Payload(bucket.entries, HostMemory(f"/proc/{os.getpid()}/fd/{descriptor}", len(data)))
