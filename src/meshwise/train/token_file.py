"""Join texts into one file of byte tokens in a cache folder (`token_file`), and map it into memory (`open_tokens`).

A token is a byte (0 … 255). A zero byte precedes every text file, so that a model learns where a text begins. The
ranks of a machine share the memory of the mapped file. The file's name is a hash of the paths, sizes and modification
times of the texts. The file is built under a lock, and appears when it is complete."""

import contextlib
import fcntl
import functools
import glob
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwise.base.atomic_file import write_whole
from meshwise.train.job import JobError

STDLIB = "python-stdlib"
"""Name in `data.files` for the source text of Python's standard library."""
START_TOKEN = 0
"""The token before every text file."""
_BLOCKS = 256
_BLOCK = 4096
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def token_file(names: Sequence[str], *, cache: Path) -> Path:
    """Return the path of the token file of these texts in the folder `cache`; build the file if it is missing.

    names: text files, folders (with all files in them that are not hidden), globs, or `python-stdlib`. Raises JobError
    for a name without files, an unreadable file, empty texts, or a cache that cannot be written."""
    with cache_errors(cache):
        files = [path for name in names for path in text_files(name, key="data.files")]
        stats = [(path, path.stat()) for path in files]
        if not any(stat.st_size for _, stat in stats):
            raise JobError(f"data.files = {list(names)}: all {len(files)} files are empty")
        inputs = "\n".join(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)
        target = cache / f"bytes-{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.bin"
        return build_once(target, write=functools.partial(_join, files))


@contextlib.contextmanager
def cache_errors(cache: Path) -> Iterator[None]:
    """Turn an OSError inside into a JobError: of the folder `cache`, or else of the data that are read."""
    try:
        yield
    except OSError as error:
        at = Path(error.filename or cache)
        if at.is_relative_to(cache) or cache.is_relative_to(at):
            hint = "name a folder that is writable and has room, as in --data.cache /tmp/meshwise-data"
            raise JobError(f"data: cannot keep the text in {cache}: {error.strerror}; {hint}") from error
        raise JobError(f"data: cannot read the text: {error.strerror}: {at}") from error


def open_tokens(path: Path) -> NDArray[np.uint8]:
    """Return the tokens of a token file as a read-only memory map."""
    return np.memmap(path, dtype=np.uint8, mode="r")


def digest(tokens: NDArray[np.uint8]) -> str:
    """Return a hash of 256 evenly spaced blocks of 4 KiB, which takes milliseconds for any number of tokens."""
    starts = np.linspace(0, max(0, len(tokens) - _BLOCK), num=_BLOCKS, dtype=np.int64)
    content = hashlib.sha256()
    for start in starts:
        content.update(tokens[start : start + _BLOCK].tobytes())
    return content.hexdigest()[:16]


def default_cache() -> Path:
    """Return the default cache folder, in $XDG_CACHE_HOME or ~/.cache. Raises JobError without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise"
    except RuntimeError as error:  # a user without an entry in passwd, as in a container
        raise JobError(
            "data: no home folder for the text cache; name another folder, as in --data.cache /tmp/meshwise-data"
        ) from error


def build_once(target: Path, *, write: Callable[[Path], None]) -> Path:
    """Return the path of a cached file; `write` it if it is missing, unless another process does so meanwhile."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            write_whole(target, write=write, aside=target.with_suffix(".partial"))
    return target


def _join(files: Sequence[Path], into: Path) -> None:
    with into.open("wb") as out:
        for path in files:
            out.write(bytes([START_TOKEN]))
            with path.open("rb") as text:
                shutil.copyfileobj(text, out)


def text_files(name: str, *, key: str) -> Iterator[Path]:
    """Yield the files that a name in the job's `key` means, sorted. Raises JobError when there are none."""
    if name == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        found = [path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts)]
    elif Path(name).is_dir():
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        found = [path for path in files if not any(part.startswith(".") for part in path.relative_to(name).parts)]
    elif Path(name).exists():
        found = [Path(name)]
    else:
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [path for path in map(Path, matches) if path.is_file()]
    if not found:
        raise JobError(f"{key}: {name!r} is neither a file, a folder with files nor a glob that matches files")
    yield from sorted(found)
