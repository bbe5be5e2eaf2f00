"""Writes and checks files of tensors in the safetensors format, with a checksum of the header and of each tensor.

The safetensors library writes a file from memory in one call, during which no other thread of the process computes. Here a file is written
piece by piece, to any file system, and its checksums are taken on the way.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping

import torch
from pyarrow import NativeFile
from torch import Tensor

from raypipe.artifacts.checkpoint_files import FileSums
from raypipe.artifacts.storage import Storage
from raypipe.errors import FormatError

Write = Callable[[memoryview], object]

_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(write: Write, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> FileSums:
    """Write contiguous tensors on the CPU, each in memory of its own; return the sums.

    Raises:
        ValueError: The format has no such type of numbers.
    """
    # The largest numbers first, as the library writes them, so that each tensor begins at a multiple of the size of its numbers.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        content[name] = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    write(memoryview(header))
    sums: dict[str, str] = {}
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        crc = 0
        for first in range(0, len(data), _PIECE_BYTES):
            piece = data[first : first + _PIECE_BYTES]
            crc = zlib.crc32(piece, crc)
            write(piece)
        sums[name] = _text(crc)
    return FileSums(size_bytes=len(header) + end, header=_text(zlib.crc32(header)), tensors=sums)


def check_tensors(folder: Storage, file_name: str, sums: FileSums) -> None:
    """Read a file and compare it with its sums.

    Raises:
        FormatError: The file is missing, or differs: names the tensor.
    """
    path = f"{folder.name}/{file_name}"
    try:
        size = folder.size(file_name)
        if size is None:
            raise FormatError(path, "", "this file of the checkpoint is missing")
        if size != sums.size_bytes:
            raise FormatError(path, "", f"has {size} bytes, but {sums.size_bytes} were written: it was cut short or altered")
        with folder.reading(file_name) as file:
            _check(file, path, sums)
    except OSError as error:
        raise FormatError(path, "", f"cannot be read ({error})") from None


def _check(file: NativeFile, path: str, sums: FileSums) -> None:
    head = file.read(8)
    (length,) = struct.unpack("<Q", head)
    text = file.read(length) if length < sums.size_bytes else b""
    if _text(zlib.crc32(head + text)) != sums.header:
        raise FormatError(path, "header", "was altered since it was written")
    entries = json.loads(text)
    for name in sorted(sums.tensors, key=lambda name: tuple(entries[name]["data_offsets"])):
        start, end = entries[name]["data_offsets"]
        crc, left = 0, end - start
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
        if left or _text(crc) != sums.tensors[name]:
            raise FormatError(path, name, "this tensor was altered since it was written")


def _dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name}: tensors of {tensor.dtype} cannot be saved; the format of checkpoints has no such numbers")
    return _DTYPES[tensor.dtype]


def _text(crc: int) -> str:
    return f"{crc:08x}"
