"""Report of a verification: the verdict, the first difference, and every figure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwise.verify.rounding_bounds import BoundedDifference

Row = tuple[str, ...]

_TELLS = 0.05  # agreement within a larger share of a value than this would hide errors that matter

_SURER = "verify with precision=fp32, or in float64"


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimizer step: loss and gradient norm of one process, and the plan's differences from them."""

    loss: float
    grad_norm: float
    loss_apart: BoundedDifference
    norm_apart: BoundedDifference


@dataclass(frozen=True)
class ParameterFigures:
    """Figures of one parameter or buffer: the worst of its gradient (None: it has none) and of its value over all
    steps.
    """

    name: str
    gradient: BoundedDifference | None
    value: BoundedDifference

    @property
    def over(self) -> bool:
        """True if either is over its bound."""
        return self.value.over or (self.gradient is not None and self.gradient.over)

    @property
    def excess(self) -> float:
        """The worse of the two as a multiple of what is allowed."""
        return max(self.value.excess, 0.0 if self.gradient is None else self.gradient.excess)


@dataclass(frozen=True)
class Divergence:
    """The first figure, in the order of computation, that is over its bound.

    | what      such as `the gradient of head.weight`
    | step      counted from 1; 0 is before the first
    | module    the first module that diverges: of the forward when its output differs, otherwise of the backward
    | detail    more that can be said: the factor between the two, the ranks that differ
    """

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
    """The outcome of `verify`, the same on every rank. Prints as text.

    | plan          as resolved
    | setting       ranks, device, dtype, optimizer and bound, in words
    | notes         what was changed or found in order to compare at all
    | steps         a line per optimizer step
    | parameters    a line per parameter, in the order of the table, then of the buffers
    | first         where the two first parted; None when the plan is the same model
    """

    plan: str
    setting: str
    notes: Sequence[str]
    steps: Sequence[StepFigures]
    parameters: Sequence[ParameterFigures]
    first: Divergence | None

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
            vague = "" if loosest <= _TELLS else f"; rounding allows for so much that this tells little: {_SURER}"
            return f"{self.plan} is the same model as one process ({found}{vague})"
        over = sum(line.over for line in self.parameters)
        return f"{self.plan} is NOT the same model as one process ({over} of {len(self.parameters)} parameters differ)"

    def step_rows(self) -> list[Row]:
        """Return the table of steps, header first."""
        header = ("step", "loss", "difference", "gradient norm", "difference")
        return [
            header,
            *(
                (str(i), f"{s.loss:.8g}", _cell(s.loss_apart), f"{s.grad_norm:.8g}", _cell(s.norm_apart))
                for i, s in enumerate(self.steps, start=1)
            ),
        ]

    def parameter_rows(self, lines: Iterable[ParameterFigures] | None = None) -> list[Row]:
        """Return the table of parameters (or of some of them), header first: the worst difference and the step it is
        from.
        """
        header = ("parameter", "gradient", "step", "value", "step")
        return [
            header,
            *(
                (
                    line.name,
                    "none" if line.gradient is None else _cell(line.gradient),
                    "" if line.gradient is None else str(line.gradient.step),
                    _cell(line.value),
                    str(line.value.step),
                )
                for line in (self.parameters if lines is None else lines)
            ),
        ]

    def __str__(self) -> str:
        parts = [self.verdict, self.setting, *self.notes]
        if self.first is not None:
            parts.append(str(self.first))
        return "\n".join([*parts, "", _table(self.step_rows()), "", _table(self.parameter_rows())])

    def _figures(self) -> list[BoundedDifference]:
        figures = [figure for step in self.steps for figure in (step.loss_apart, step.norm_apart)]
        for line in self.parameters:
            figures += [line.value] if line.gradient is None else [line.gradient, line.value]
        return figures


def _cell(figure: BoundedDifference) -> str:
    return f"{figure.difference:.1e}{' !' if figure.over else ''}"


def _table(rows: Sequence[Row]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
