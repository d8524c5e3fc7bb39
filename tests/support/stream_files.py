"""Small streams on disk: parquet files and WebDataset tar files whose instructions are numbered from 0."""

import io
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image

from pictures import encoded


def png(number: int) -> bytes:
    """Return the PNG of an image whose colour encodes its number."""
    return encoded(Image.new("RGB", (8, 6), (number % 256, number // 256, 0)))


def parquet(folder: Path, *, files: int = 3, rows: int = 20, group: int = 6, damaged: tuple[int, ...] = ()) -> Path:
    """Write ``files`` parquet files of ``rows`` rows in row groups of ``group``; images of ``damaged`` rows cannot be decoded."""
    folder.mkdir(parents=True)
    for file in range(files):
        numbers = range(file * rows, (file + 1) * rows)
        table = pyarrow.Table.from_pylist(
            [
                {"instruction": f"edit {n}", "image": {"bytes": b"\x89PNG" if n in damaged else png(n), "path": None}, "level": n}
                for n in numbers
            ]
        )
        pyarrow.parquet.write_table(table, folder / f"train-{file:05}.parquet", row_group_size=group)
    return folder


def tar(folder: Path, *, files: int = 3, rows: int = 20) -> Path:
    """Write ``files`` tar files of ``rows`` samples, each with an image and a text."""
    folder.mkdir(parents=True)
    for file in range(files):
        with tarfile.open(folder / f"train-{file:05}.tar", "w") as archive:
            for number in range(file * rows, (file + 1) * rows):
                for extension, data in (("png", png(number)), ("txt", f"edit {number}".encode())):
                    info = tarfile.TarInfo(f"{number:06}.{extension}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return folder
