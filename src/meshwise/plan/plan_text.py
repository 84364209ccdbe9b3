"""Read the text of a plan, word by word (`read_words`).

`dp=2 zero=1` and `DP=2, zero = 1` are the same plan, which prints as the first text. `dp=4x8` gives two keys: dp and
shards. Ambiguous text is refused. A path with spaces is written in double quotes: `schedule="my tables/one.txt"`."""

import difflib
import re
from collections.abc import Collection, Iterable

from meshwise.plan.plan_keys import PlanError

_UNQUOTED = r'(?=(?:[^"]*"[^"]*")*[^"]*$)'
_BETWEEN = re.compile(rf"(?:[,;]?(?:\s+|$)|[,;](?=[-\w]+=)){_UNQUOTED}")
_EQUALS = re.compile(rf"\s*=\s*{_UNQUOTED}")


def read_words(text: str) -> dict[str, int | str]:
    """Return the values by key of `key=value` words, unchecked; numbers are int. Raises PlanError for other words."""
    values: dict[str, int | str] = {}
    if text.count('"') % 2:
        raise PlanError(f'a quote in the plan {text!r} is not closed; write " before and after a path with spaces')
    for word in filter(None, _BETWEEN.split(_EQUALS.sub("=", text))):
        name, equals, value = word.partition("=")
        if not equals:
            raise PlanError(f"{word!r} in the plan {text!r} is not key=value; write it as in 'dp=2 zero=1'")
        key = name.lower().replace("-", "_")
        given = {key: value}
        if key == "dp" and (found := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value)):
            given = {"dp": str(int(found[1]) * int(found[2])), "shards": found[2]}
        if twice := given.keys() & values.keys():
            raise PlanError(f"{min(twice)} is given twice in the plan {text!r}; keep one of them")
        for key, value in given.items():
            values[key] = int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else re.sub(r'^"([^"]*)"$', r"\1", value)
    return values


def check_keys(given: Iterable[str], *, known: Collection[str]) -> None:
    """Raise PlanError for the first unknown key, with the nearest known key."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {' '.join(known)}"
            raise PlanError(f"unknown plan key {key!r}; {hint}")
