"""Test split models: run ranks, train under a plan and on one process, compare the figures, count the collectives.

- `run` calls a function on N ranks, as threads or as processes
- `outcome` trains under a plan, `alone` trains on one process in plain torch (`ReferenceRun`); both return all figures
- `agree` raises `Disagreement` unless two such outcomes are equal up to a bound; `difference` compares two tensors
- `count` counts the collectives of a block of code, to compare with a formula
- `SavedForBackward` measures the bytes that a forward saves for its backward

A whole test:

    def main(world):
        trainer = parallelize(build, "dp=4 zero=3", loss=loss, world=world, lr=1e-3)
        return outcome(trainer, batches=batches)

    agree(run(4, main)[0], alone(build, loss=loss, batches=batches, lr=1e-3), bound=1e-9)"""

from meshwise.testing.agree import Counts, Disagreement, RankRunner, SavedForBackward, agree, alone, count, outcome, run
from meshwise.testing.reference_run import Difference, ReferenceRun, difference

__all__ = [
    "Counts",
    "Difference",
    "Disagreement",
    "RankRunner",
    "ReferenceRun",
    "SavedForBackward",
    "agree",
    "alone",
    "count",
    "difference",
    "outcome",
    "run",
]
