import dataclasses
import io
import math

from meshwise.cli.verify_command import print_report
from meshwise.train.console_output import OutputConsole
from meshwise.verify.rounding_bounds import BoundedDifference
from meshwise.verify.verification_report import Divergence, ParameterFigures, Report, StepFigures


def figure(difference: float, step: int = 1) -> BoundedDifference:
    return BoundedDifference(difference, 1e-9, step)


REPORT = Report(
    plan="dp=2 zero=1",
    setting="2 x cpu, 2 steps, bound 1e-09",
    notes=("note: something to know",),
    steps=(
        StepFigures(2.5, 0.75, figure(0.0), figure(2e-16)),
        StepFigures(2.25, 12.5, figure(3e-16, 2), figure(0.41, 2)),
    ),
    parameters=(
        ParameterFigures("embedding.weight", figure(1.0, 2), figure(2e-3, 2)),
        ParameterFigures("positions.weight", None, figure(0.0, 1)),
    ),
    first=Divergence(
        "the gradient of embedding.weight", 2, figure(1.0, 2), "embedding", "it is 2 times the expected value"
    ),
)

DRAWN = """\
dp=2 zero=1 is NOT the same model as one process (1 of 2 parameters differ)
2 x cpu, 2 steps, bound 1e-09
note: something to know
first to differ: the gradient of embedding.weight, in step 2: relative difference 1.0e+00, bound 1.0e-09; it is 2 times the expected value
first module that diverges: embedding

step  loss  difference  gradient norm  difference
1      2.5     0.0e+00           0.75     2.0e-16
2     2.25     3.0e-16           12.5   4.1e-01 !

parameter          gradient  step      value  step
embedding.weight  1.0e+00 !     2  2.0e-03 !     2
positions.weight       none          0.0e+00     1"""  # noqa: E501


def test_a_report_prints_the_verdict_the_first_difference_and_both_tables() -> None:
    assert str(REPORT) == DRAWN


def test_a_report_without_a_difference_is_ok_and_gives_the_figure_nearest_its_bound() -> None:
    sound = dataclasses.replace(
        REPORT, first=None, steps=(), parameters=(ParameterFigures("head.weight", figure(3e-10), figure(2e-10)),)
    )
    assert sound.ok
    assert not REPORT.ok
    assert (
        sound.verdict == "dp=2 zero=1 is the same model as one process (at most 3.0e-10 apart where 1.0e-09 is allowed)"
    )


def test_a_loose_bound_adds_a_warning_to_the_verdict() -> None:
    rough = ParameterFigures("head.weight", BoundedDifference(0.25, 3.7, 1), BoundedDifference(1e-4, 1e-2, 1))
    report = dataclasses.replace(REPORT, first=None, steps=(), parameters=(rough,))
    assert "2.5e-01 apart where 3.7e+00 is allowed; with so wide a bound this proves little" in report.verdict
    assert "precision=fp32, or in float64" in report.verdict


def test_a_difference_before_the_first_step_is_printed_as_such() -> None:
    initial = Divergence("the value of head.weight", 0, BoundedDifference(math.inf, 1e-9, 0), "head")
    assert str(initial).startswith("first to differ: the value of head.weight, before the first step: ")


def test_the_command_shows_the_parameters_nearest_their_bounds_and_counts_the_rest() -> None:
    many = tuple(ParameterFigures(f"p{i}", None, figure(i * 1e-12)) for i in range(100))
    text = io.StringIO()
    print_report(dataclasses.replace(REPORT, first=None, parameters=many), console=OutputConsole(file=text, width=60))
    shown = [line.split()[0] for line in text.getvalue().splitlines() if line.startswith("p") and "none" in line]
    assert shown == [f"p{i}" for i in range(60, 100)]
    assert "and 60 more, all smaller relative to the bound" in text.getvalue()
