"""docs/plans.md, made from the keys and the compatibility table."""

from meshwise.plan.compatibility import COMPATIBILITY
from meshwise.plan.plan import Plan
from meshwise.plan.plan_keys import keys_of


def plans_page() -> str:
    """Return the keys and the compatibility table, as markdown."""
    defaults = Plan()
    keys = [
        f"| `{name}` | `{getattr(defaults, name)}` | {key.range()} | {key.meaning} |"
        for name, key in keys_of(Plan).items()
    ]
    rows = [f"| `{row.when}` | {row.reason} | `{row.instead}` |" for row in COMPATIBILITY]
    return "\n".join([_PAGE_HEAD, *keys, _PAGE_MIDDLE, *rows, ""])


_PAGE_HEAD = """\
# Plans

A plan says how a model is split. It is one line of text, a TOML table or keywords:

```
meshwise.Plan.parse("dp=2 zero=1") == meshwise.Plan(dp=2, zero=1)
```

`DP=2, zero = 1` says the same: commas between words, blanks around `=`, and keys in capitals or with hyphens are read
as what they mean. What is in doubt is refused, with the spelling that works.

The degrees of `pp dp cp ep tp` multiply to the number of ranks, and lie in that order on the mesh: `tp` joins
neighbouring ranks, and is itself a grid under `tp_mode=2d`, `2.5d` and `3d`.
This page is made from `src/meshwise/plan` by `make docs`.

| key | default | values | meaning |
|---|---|---|---|"""

_PAGE_MIDDLE = """
## What cannot work together

A plan is refused when it is made, with the reason and the nearest plan that works.

| a plan with | cannot work, because | nearest plan |
|---|---|---|"""
