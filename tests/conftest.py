"""What holds for every test: one thread a process, the same hypothesis examples, CUDA tests where there is CUDA."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples on every run, and no deadline: on a busy machine a slow example says nothing about the code.
settings.register_profile("meshwise", derandomize=True, deadline=None, database=None, max_examples=100)
settings.load_profile("meshwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
