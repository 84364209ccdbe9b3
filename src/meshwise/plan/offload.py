"""Tiers on which state rests between its uses: the device, host memory or disk.

    optimizer=cpu, params=disk      is written  `optimizer:cpu,params:disk`

    | optimizer      the optimizer's state
    | masters        what is updated, where that is another tensor than the parameters: wider, or on the CPU
    | gradients      the reduced ones that this rank updates with
    | params         the parameters that this rank keeps
    | activations    what a forward saves for its backward

Updated tensors must lie where the update runs, so some tiers follow others unless they are given. The optimizer's state
goes to the CPU with masters or parameters, masters follow the optimizer's state, and gradients go to the CPU with it.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from meshwise.plan.plan_keys import Key, PlanError

TIERS = ("device", "cpu", "disk")
NONE = "none"


@dataclass(frozen=True)
class Offload:
    """The tier of each thing: `device`, `cpu` or `disk`. Prints as a short text that parses back."""

    optimizer: str = "device"
    masters: str = "device"
    gradients: str = "device"
    params: str = "device"
    activations: str = "device"

    @classmethod
    def parse(cls, text: str) -> Offload:
        """Read `none` or `what:tier` joined by commas. Raises PlanError."""
        given: dict[str, str] = {}
        for word in text.split(",") if text != NONE else ():
            what, colon, tier = word.partition(":")
            if what not in WHAT or not colon or tier not in TIERS:
                near = _near(what, WHAT), _near(tier, TIERS[1:])
                raise PlanError(
                    f"offload={text}: {word!r} is not what:tier, of {' '.join(WHAT)} and {' '.join(TIERS)}. "
                    f"Nearest that works: 'offload={near[0]}:{near[1]}'"
                )
            if what in given:
                raise PlanError(f"offload={text}: {what} is given twice. Nearest that works: 'offload={what}:{tier}'")
            given[what] = tier
        made = cls(**_followed(given))
        if made.optimizer == "device" and (made.masters, made.params) != ("device", "device"):
            nearest = cls(**_followed(given | {"optimizer": "cpu"}))
            raise PlanError(
                f"offload={text}: what is updated lies where the optimizer's state is, so that cannot stay on the "
                f"device when masters or params leave it. Nearest that works: 'offload={nearest}'"
            )
        return made

    def __str__(self) -> str:
        given: dict[str, str] = {}
        for what in WHAT:
            if getattr(self, what) != _followed(given)[what]:
                given[what] = getattr(self, what)
        for what in [what for what in given if len(given) > 1]:
            less = {other: tier for other, tier in given.items() if other != what}
            if _followed(less) == dataclasses.asdict(self):
                given = less
        return ",".join(f"{what}:{tier}" for what, tier in given.items()) or NONE

    @property
    def updates_on_cpu(self) -> bool:
        """True if the optimizer runs on the CPU whatever the device."""
        return self.optimizer != "device"

    @property
    def uses_disk(self) -> bool:
        """True if any state rests on disk."""
        return "disk" in (self.optimizer, self.masters, self.gradients, self.params)


WHAT = tuple(item.name for item in dataclasses.fields(Offload))


@dataclass(frozen=True)
class OffloadKey(Key):
    """A key whose values are texts of `Offload`."""

    def read(self, value: Any) -> Any:
        """Return a short text that means the same; what cannot be read stays, for `check` to refuse."""
        try:
            return str(Offload.parse(value)) if isinstance(value, str) else value
        except PlanError:
            return value

    def range(self) -> str:
        """Return the values in words, as markdown."""
        return f"`none`, or `what:tier` joined by commas: {', '.join(WHAT)}; {', '.join(TIERS[1:])}"

    def check(self, value: Any, *, name: str) -> None:
        """Raise PlanError for anything but a text of `Offload`."""
        if not isinstance(value, str):
            raise PlanError(f"{name}={value!r}: {name} is a text; write it as in '{name}=optimizer:cpu'")
        Offload.parse(value)


def offload(means: str) -> Any:
    """Return a field that takes texts of `Offload`, none by default."""
    return field(default=NONE, metadata={"key": OffloadKey(means, words=(NONE,))})


def _followed(given: dict[str, str]) -> dict[str, str]:
    """Return all tiers, those that are not given after those that are."""
    tiers = dict.fromkeys(WHAT, "device") | given
    if "optimizer" not in given and (tiers["masters"], tiers["params"]) != ("device", "device"):
        tiers["optimizer"] = "cpu"
    if "masters" not in given:
        tiers["masters"] = tiers["optimizer"]
    if "gradients" not in given and tiers["optimizer"] != "device":
        tiers["gradients"] = "cpu"
    return tiers


def _near(word: str, words: tuple[str, ...]) -> str:
    return (difflib.get_close_matches(word, words, n=1, cutoff=0.3) or words[:1])[0]
