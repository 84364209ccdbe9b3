"""Freed memory goes back to the system once, and is kept from then on where that is set."""

import ctypes
import multiprocessing
import os
import resource

import pytest

from meshwise.comm.launch.fork_server import start_context
from meshwise.memory.malloc_options import KEEP_FREED, MAP_SEPARATELY, keep_freed_memory, set_malloc

SIZE = 64 << 20

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")


def pages_of_one_more(environment: dict[str, str], keep: bool, answers: "multiprocessing.SimpleQueue[int]") -> None:
    """Take memory twice, freed in between, in a process with such settings: the pages that the second time costs."""
    forget_settings()
    os.environ.update(environment)
    set_malloc(KEEP_FREED if keep else ())
    answers.put(pages_of_the_second_time())


def forget_settings() -> None:
    """Those of malloc, and the system's to give huge pages to all: then a page that comes again is one in 512."""
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        del os.environ[name]


def pages_of_the_second_time() -> int:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = library.malloc(ctypes.c_size_t(SIZE))
        ctypes.memset(block, 1, SIZE)
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def pages_inside_and_after(answers: "multiprocessing.SimpleQueue[int]") -> None:
    """The same while what is freed is kept, and after that."""
    forget_settings()
    with keep_freed_memory():
        inside = pages_of_the_second_time()
    answers.put(inside)
    answers.put(pages_of_the_second_time())


class Mallinfo(ctypes.Structure):
    """C's `struct mallinfo2`."""

    _fields_ = [
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def bytes_apart(asked: bool, answers: "multiprocessing.SimpleQueue[int]") -> None:
    """How many bytes of a block lie outside of the heap, in a process that kept what it freed."""
    forget_settings()
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.mallinfo2.restype = Mallinfo
    set_malloc(KEEP_FREED)  # from here on blocks of any size lie in the heap
    if asked:
        set_malloc(MAP_SEPARATELY)
    before = library.mallinfo2().hblkhd
    library.malloc(ctypes.c_size_t(SIZE // 8))
    answers.put(library.mallinfo2().hblkhd - before)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("asked", [False, True])
def test_large_blocks_have_their_own_mappings_on_request(asked: bool) -> None:
    answers: multiprocessing.SimpleQueue[int] = start_context().SimpleQueue()
    finished(start_context().Process(target=bytes_apart, args=(asked, answers)))
    assert (answers.get() >= SIZE // 8) == asked


@pytest.mark.parametrize(
    "environment, keep, comes_again", [({}, True, False), ({}, False, True), ({"MALLOC_ARENA_MAX": "4"}, True, True)]
)
def test_freed_memory_is_kept_on_request_unless_the_environment_configures_malloc(
    environment: dict[str, str], keep: bool, comes_again: bool
) -> None:
    answers: multiprocessing.SimpleQueue[int] = start_context().SimpleQueue()
    finished(start_context().Process(target=pages_of_one_more, args=(environment, keep, answers)))
    assert (answers.get() > SIZE // resource.getpagesize() // 2) == comes_again


def test_freed_memory_is_kept_inside_the_block() -> None:
    answers: multiprocessing.SimpleQueue[int] = start_context().SimpleQueue()
    finished(start_context().Process(target=pages_inside_and_after, args=(answers,)))
    most = SIZE // resource.getpagesize() // 2
    assert answers.get() < most < answers.get()


def finished(process: "multiprocessing.process.BaseProcess") -> None:
    process.start()
    process.join()
    assert process.exitcode == 0
