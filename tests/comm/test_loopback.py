"""Test a store in a forked copy of its process."""

import gc
import os
import threading

import pytest

from meshwise.comm.network.job_store import loopback_store


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on
def test_a_copy_of_the_process_lets_go_of_a_store_and_lives() -> None:
    stores = [loopback_store()]
    if (copy := os.fork()) == 0:
        # These get the stacks of the threads that are not here, and more than 40 MB of stacks the system takes back.
        meeting = threading.Barrier(12)
        threads = [threading.Thread(target=meeting.wait) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stores.clear()
        gc.collect()
        os._exit(7)
    _, status = os.waitpid(copy, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    stores[0].set("still", "here")
    assert stores[0].get("still") == b"here"


def test_a_store_that_nobody_needs_is_closed() -> None:
    store = loopback_store()
    port = store.port
    with pytest.raises(OSError):  # noqa: PT011 - the system's own words
        loopback_store(port)
    del store
    assert loopback_store(port).port == port
