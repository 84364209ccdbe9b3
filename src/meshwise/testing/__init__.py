"""Test tools for split models, the ones this project tests itself with.

- `run`: a function on N ranks, as threads or as warm processes
- `agree`: two outcomes are the same, up to a bound
- `count`: the collectives of a block, against a formula

As one test:

    def main(world):
        trainer = mw.parallelize(build, "dp=4 zero=3", loss=loss, world=world)
        return outcome(trainer, batches)

    agree(run(4, main)[0], alone(build, loss, batches), bound=1e-9)
"""

from meshwise.testing.agree import Disagreement, agree
from meshwise.testing.count import Counts, count
from meshwise.testing.difference import Difference, difference
from meshwise.testing.processes import Processes
from meshwise.testing.run import run

__all__ = ["Counts", "Difference", "Disagreement", "Processes", "agree", "count", "difference", "run"]
