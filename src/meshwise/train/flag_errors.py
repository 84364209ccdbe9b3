"""What tyro says about flags, in a line that names the flag and what to change.

╭─ title ─────╮        title
│ words       │        ---------------
│ ─────────── │ or     words
│ more words  │        ---------------
╰─────────────╯        more words           where stdout takes no such characters
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

_ALIKE = 0.6
_FAR = 0.9
_TOLD = (
    (r"(?:Error parsing )?(--[-.\w]+): invalid literal for int\(\) with base 10: (.+)", r"\1: \2 is no whole number"),
    (r"(?:Error parsing )?(--[-.\w]+): could not convert string to float: (.+)", r"\1: \2 is no number"),
    (r"invalid choice (.+) for argument '(--[-.\w]+)'\. Expected one of \((.+?),?\)\.", r"\2: \1 is none of \3"),
    (r"Missing value for argument '(--[-.\w]+)'\..*", r"\1 is given without a value"),
    (
        r"Error parsing (--[-.\w]+): no type matching \{None\}\|\{?(.+?)\}? could be .+ from \[(.+)\]\.",
        r"\1 takes \2, not \3",
    ),
    (r"Error parsing (--[-.\w]+: .+)", r"\1"),
    (r"Error parsing \w+: (.+)", r"\1"),
)
"""What tyro says, as patterns, and what is said instead."""


def explained(said: str, *, words: Sequence[str], keys: Collection[str]) -> str:
    """Return tyro's message about these words as one that names the dotted `keys`."""
    message = _unboxed(said)
    if unknown := re.match(r"Unrecognized options: (\S+?)(?:[,\s]|$)", message):
        return _unknown(unknown[1], words, keys)
    for pattern, instead in _TOLD:
        if re.fullmatch(pattern, message, re.DOTALL):
            return re.sub(pattern, instead, message, flags=re.DOTALL)
    return message


def without_flag(message: str) -> str:
    """Return the message without the name of the flag, for a place that names the key itself."""
    return re.sub(r"^--[-.\w]+: ", "", message)


def _unknown(word: str, words: Sequence[str], keys: Collection[str]) -> str:
    """Return what to change about a word that is neither a flag nor a value of one."""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    if word.startswith("--"):
        nearest = max(keys, key=lambda key: _like(key, name))
        section, _, last = name.rpartition(".")
        if f"{section}.arguments" in keys and _likeness(nearest.split(".")[-1], last) < _ALIKE:
            return (
                f"unknown key {name}; an argument of what is named there is given as in --{section}.arguments {last}=…"
            )
        if section in keys and section.endswith((".arguments", ".tensor_rules")):
            return f"unknown key {name}; {section} is a table, and {last} in it is given as in --{section} {last}=…"
        hint = f"did you mean {nearest}?" if _like(nearest, name) > _FAR else f"there are {', '.join(keys)}"
        return f"unknown key {word[2:].partition('=')[0]}; {hint}"
    if name in keys:
        return f"{word!r} is no flag; did you mean '--{word.lstrip('-')}'?"
    if word.endswith(".toml"):
        return f"{word!r} is not in its place; a job, and there is one, is named before all flags"
    place = [*words, word].index(word)
    flags = [index for index, before in enumerate(words[:place]) if before.startswith("--")]
    if not flags:
        return f"unexpected {word!r}; flags begin with --, as in --{next(iter(keys)).replace('_', '-')}"
    flag, _, value = words[flags[-1]].partition("=")
    value = " ".join(filter(None, [value, *words[flags[-1] + 1 : place + 1]]))
    return f'unexpected {word!r}; a value with blanks is written in quotes, as in {flag} "{value}"'


def _like(key: str, name: str) -> float:
    """Return the similarity of two dotted names: as wholes and by their last words."""
    return _likeness(key, name) + _likeness(key.rpartition(".")[-1], name.rpartition(".")[-1])


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _unboxed(text: str) -> str:
    """Return the words of a message that was drawn into a box, without its title, its frame and the pointer to
    --help.
    """
    lines = [line.strip("│ ") for line in text.splitlines()]
    rule = re.compile(r"╭.*|[-─╰╯]{3,}")
    sections = [""]
    for line in lines:
        sections = [*sections, ""] if rule.fullmatch(line) else [*sections[:-1], f"{sections[-1]} {line}"]
    told = [" ".join(section.split()) for section in sections[1:]]
    kept = [part for part in told if part and not part.startswith(("For full help", "Argument help"))]
    return "\n  ".join(kept).partition(" Got errors: ")[0]
