"""Run code later, or in another thread, in the grad mode of the original call.

A tensor made in torch.inference_mode cannot be written outside of it. The thread that completes a call may be outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def as_called(job: Callable[[], None]) -> Callable[[], None]:
    """`job`, to be done in inference mode when that is on now."""
    if not torch.is_inference_mode_enabled():
        return job

    def inside() -> None:
        with torch.inference_mode():
            job()

    return inside
