"""Result of `verify`: if a plan computes what one process computes, the first number that differs, all numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwise.base.text_format import align_columns
from meshwise.verify.rounding_bounds import BoundedDifference

SAME_MODEL = "the same model as one process"
_LOOSE = 0.05
"""Relative bound above which errors that matter may be hidden."""


@dataclass(frozen=True)
class StepFigures:
    """Mean loss and gradient norm of the reference run in one step, and the plan's relative differences from them."""

    loss: float
    grad_norm: float
    loss_apart: BoundedDifference
    norm_apart: BoundedDifference


@dataclass(frozen=True)
class ParameterFigures:
    """Largest differences of one parameter or buffer over all steps; `gradient` is None without a gradient."""

    name: str
    gradient: BoundedDifference | None
    value: BoundedDifference

    @property
    def figures(self) -> list[BoundedDifference]:
        """The gradient, if there is one, and the value."""
        return [self.value] if self.gradient is None else [self.gradient, self.value]

    @property
    def excess(self) -> float:
        """The larger excess of gradient and value, as a multiple of the bound."""
        return max(figure.excess for figure in self.figures)


@dataclass(frozen=True)
class Divergence:
    """A compared number and its place. Of those over their bound, the first one computed is `Report.first`.

    | what      name of the figure, such as `the gradient of head.weight`
    | step      counted from 1; 0 is before the first step
    | module    name of the first module whose output differs, else of the figure's own module; None without a module
    | detail    the factor between both values, or the difference between ranks, in words"""

    what: str
    step: int
    figure: BoundedDifference
    module: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.what}, {f'in step {self.step}' if self.step else 'before the first step'}"
        apart = f"relative difference {self.figure.difference:.1e}, bound {self.figure.bound:.1e}"
        lines = [f"first to differ: {text}: {apart}{f'; {self.detail}' if self.detail else ''}"]
        if self.module is not None:
            lines.append(f"first module that diverges: {self.module or '(the whole model)'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Result of `verify`, equal on every rank. Prints as text.

    | plan          text of the plan, with dp resolved
    | setting       ranks, device, steps and bound, in words
    | notes         changes that the comparison needed, and the dtype that sets the bound
    | steps         figures of every optimizer step
    | parameters    figures of every parameter, then of every buffer
    | first         the first figure over its bound; None if the model under the plan is the same"""

    plan: str
    setting: str
    notes: Sequence[str]
    steps: Sequence[StepFigures]
    parameters: Sequence[ParameterFigures]
    first: Divergence | None
    undecided: bool = False
    """True if figures differ, and a router that chose between two nearly equal scores may be the reason."""
    same_as: str = SAME_MODEL
    """Text that follows "dp=2 is" or "is NOT" in the verdict."""

    @property
    def ok(self) -> bool:
        """True if every figure is within its bound."""
        return self.first is None

    @property
    def verdict(self) -> str:
        """Verdict in one line: the plan, and whether it is the same model as one process."""
        if self.ok:
            worst = max(self._figures(), key=lambda figure: figure.excess)
            found = f"at most {worst.difference:.1e} apart where {worst.bound:.1e} is allowed"
            loosest = max(figure.bound for figure in self._figures())
            advice = "this proves little: verify with precision=fp32, or in float64"
            warning = "" if loosest <= _LOOSE else f"; with so wide a bound {advice}"
            return f"{self.plan} is {self.same_as} ({found}{warning})"
        over = sum(any(figure.over for figure in line.figures) for line in self.parameters)
        if self.undecided:
            return (
                f"{self.plan} is undecided ({over} of {len(self.parameters)} parameters differ, and a router had a tie "
                "that rounding may break); verify with another seed or batch"
            )
        return f"{self.plan} is NOT {self.same_as} ({over} of {len(self.parameters)} parameters differ)"

    def step_rows(self) -> list[tuple[str, ...]]:
        """Return the table of steps, header first: loss and gradient norm, each with its difference."""
        rows: list[tuple[str, ...]] = [("step", "loss", "difference", "gradient norm", "difference")]
        for i, s in enumerate(self.steps, start=1):
            rows.append((str(i), f"{s.loss:.8g}", _cell(s.loss_apart), f"{s.grad_norm:.8g}", _cell(s.norm_apart)))
        return rows

    def parameter_rows(self, lines: Iterable[ParameterFigures] | None = None) -> list[tuple[str, ...]]:
        """Return the table of `lines`, by default all parameters, header first: largest differences and their steps."""
        rows: list[tuple[str, ...]] = [("parameter", "gradient", "step", "value", "step")]
        for line in self.parameters if lines is None else lines:
            gradient = ("none", "") if line.gradient is None else (_cell(line.gradient), str(line.gradient.step))
            rows.append((line.name, *gradient, _cell(line.value), str(line.value.step)))
        return rows

    def __str__(self) -> str:
        parts = [self.verdict, self.setting, *self.notes]
        if self.first is not None:
            parts.append(str(self.first))
        return "\n".join([*parts, "", align_columns(self.step_rows()), "", align_columns(self.parameter_rows())])

    def _figures(self) -> list[BoundedDifference]:
        figures = [figure for step in self.steps for figure in (step.loss_apart, step.norm_apart)]
        return figures + [figure for line in self.parameters for figure in line.figures]


def _cell(figure: BoundedDifference) -> str:
    return f"{figure.difference:.1e}{' !' if figure.over else ''}"
