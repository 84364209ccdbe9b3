"""Make docs/plans.md from the keys and the compatibility table: `make docs`."""

from pathlib import Path

from meshwise.plan.compatibility import ALONE, COMPATIBILITY
from meshwise.plan.plan import Plan
from meshwise.plan.plan_keys import keys_of


def plans_page() -> str:
    """Return the page docs/plans.md: the keys and the compatibility table, as Markdown."""
    defaults = Plan()
    keys = [
        f"| `{name}` | `{key.show(getattr(defaults, name))}` | {key.range()} | {key.meaning} |"
        for name, key in keys_of(Plan).items()
    ]
    rows = [f"| `{row.when}` | {row.reason} | `{row.instead}` |" for row in (*COMPATIBILITY, *ALONE)]
    return "\n".join([_PAGE_HEAD, *keys, _PAGE_MIDDLE, *rows, ""])


_PAGE_HEAD = """\
# Plans

Choose how a model is split, in one line of text, in a TOML table or with keywords:

```
meshwise train job.toml --plan "dp=2 zero=1"
```
```python
meshwise.Plan.parse("dp=2 zero=1") == meshwise.Plan(dp=2, zero=1)
```

`DP=2, zero = 1` is the same plan: commas between words, blanks around `=`, capitals and hyphens in keys are allowed.
Ambiguous text is refused, with a spelling that works.

The degrees of `pp dp cp tp` multiply to the number of ranks. The mesh has the axes in this order, so `tp` joins
neighbouring ranks. Under `tp_mode=2d`, `2.5d` and `3d`, `tp` is itself a grid. `ep` and `etp` divide the ranks of
`dp cp tp` anew, for the experts of a mixture alone: [experts.md](experts.md). `make docs` makes this page from
`src/meshwise/plan`.

| key | default | values | meaning |
|---|---|---|---|"""

_PAGE_MIDDLE = """
## Limits

These combinations are refused when a plan is made, with the reason and the nearest plan that works.

| a plan with | cannot work, because | nearest plan |
|---|---|---|"""


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "plans.md").write_text(plans_page(), encoding="utf-8")
