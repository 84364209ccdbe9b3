"""Turn the result of a plan search into tables of text."""

import re
from collections import defaultdict
from collections.abc import Mapping

from meshwise.planner.search import Candidate, EstimateLevel, SearchResult
from meshwise.simulate.simulation_tables import Table, size_text

FULL = "out of memory"
"""Reason of plans that need more memory than the limit."""
REFUSED = "refused"
"""First word of the reason of plans that the training code refuses."""
UNTRIED = "not rehearsed: it may still be among the best"
"""Reason of plans that were not rehearsed, and whose lower bound is faster than the table's slowest plan."""


def best_table(result: SearchResult, *, top: int) -> Table:
    """Return the best plans with time, memory, bubble and waits. `?` after a number: the place is not proven."""
    rows: Table = [("", "step", "", "memory", "bubble", "waits", "plan")]
    best = result.best()[:top]
    for number, one in enumerate(best):
        figures, quickest = one.figures, best[0].figures.seconds
        waits = sum(figures.exposed.values()) / figures.seconds
        more = f"+{100 * (figures.seconds / quickest - 1):.1f} %" if number else ""
        part = f"{100 * figures.bubble / figures.seconds:.1f} %"
        cells = (
            f"{figures.seconds:.4g} s",
            more,
            size_text(figures.memory),
            part,
            f"{100 * waits:.1f} %",
            str(one.plan),
        )
        rows.append((f"{number + 1}{'' if number < result.proven else '?'}", *cells))
    return rows


def lost_table(result: SearchResult, *, top: int) -> Table:
    """Return a row for each reason why plans lost: number of plans, least and greatest excess, the nearest plan."""
    rows: Table = [("plans", "lost because", "by at least", "", "nearest")]
    for reason, candidates in sorted(_reasons(result, top).items(), key=lambda item: -len(item[1])):
        each = [_excess(one, result, reason) for one in candidates]
        nearest = candidates[each.index(min(each))]
        amount = [size_text(size) if reason == FULL else f"{100 * size:.1f} %" for size in (min(each), max(each))]
        if reason.startswith((REFUSED, UNTRIED)):
            amount = ["", ""]
        to = f"to {amount[1]}" if amount[1] and amount[1] != amount[0] else ""
        rows.append((str(len(candidates)), reason, amount[0], to, str(nearest.plan)))
    return rows


def _reasons(result: SearchResult, top: int) -> Mapping[str, list[Candidate]]:
    """Return the plans that lost, by reason. Refusals that differ only in numbers are one reason."""
    best = result.best()[:top]
    plans = {one.plan for one in best}
    last = best[-1].figures.seconds if best else 0.0
    found: dict[str, list[Candidate]] = defaultdict(list)
    refused: dict[str, list[Candidate]] = defaultdict(list)
    for one in (one for one in result.candidates.values() if one.plan not in plans):
        if one.refused:
            refused[re.sub(r"\d+", "", _unplanned(one))].append(one)
        elif not result.fits(one):
            found[FULL].append(one)
        elif one.level is not EstimateLevel.REHEARSED and one.figures.seconds < last:
            found[UNTRIED].append(one)
        else:
            found[f"slower: {_where(one, best[0])}" if best else UNTRIED].append(one)
    for candidates in refused.values():
        nearest = min(candidates, key=lambda one: _excess(one, result, REFUSED))
        found[f"{REFUSED}: {_unplanned(nearest)}"] = candidates
    return found


def _where(one: Candidate, best: Candidate) -> str:
    """Return the part of the step in which a plan exceeds the best plan by the most seconds."""
    parts, least = one.figures.parts(), best.figures.parts()
    return max(parts, key=lambda part: parts[part] - least.get(part, 0.0))


def _excess(one: Candidate, result: SearchResult, reason: str) -> float:
    """Return the extra time as a fraction of the best time; for `FULL`, or without a best plan, the excess bytes."""
    best = result.best()
    if reason == FULL or not best:
        return one.figures.memory - result.limit
    return one.figures.seconds / best[0].figures.seconds - 1


def _unplanned(one: Candidate) -> str:
    """Return the first sentence of a refusal without the plan's text, so that equal reasons are equal texts."""
    message = re.sub(r"the plan '[^']*' cannot work(?: for this model)?: ", "", one.refused)
    message = re.sub(r"'(?:\w+=[^' ]+ ?)+'", "the plan", message)  # a plan with its own cut differs from `one.plan`
    words = " ".join(word for line in message.splitlines()[:2] for word in line.split())
    return words.split(". ")[0].split("; ")[0]
