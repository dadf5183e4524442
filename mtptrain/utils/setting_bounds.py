"""Declares bounds of settings in dataclass fields, such as `epochs: int = at_least(1, default=1)`, and checks them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from os.path import lexists
from pathlib import Path
from typing import Any, TypeVar

from mtptrain.utils.errors import UserError

T = TypeVar("T")

BOUND = "bound"
"""Key of the bound in a field's metadata."""


@dataclass(frozen=True)
class Bound:
    holds: Callable[[Any], bool]
    requirement: str
    """Completes "must ..." in the error message."""
    hint: str = "correct it"
    """The advice that ends the error message."""


def at_least(least: float, *, default: T) -> T:
    """Declare a setting that is a finite number of at least `least`, or None if that is the default."""
    return _number(lambda value: least <= value < math.inf, f"a number of at least {least}", default)


def between(least: float, most: float, *, default: T) -> T:
    """Declare a setting that is a number from `least` to `most`, both included, or None if that is the default."""
    return _number(lambda value: least <= value <= most, f"a number from {least:,} to {most:,}", default)


def _number(holds: Callable[[Any], bool], requirement: str, default: T) -> T:
    or_null = "null or " if default is None else ""
    return _bounded(holds, f"be {or_null}{requirement}", "correct it in the recipe or on the command line", default)


def each_at_least(least: int, may_be_empty: bool = False) -> dict[str, Bound]:
    """Returns the metadata of a field that is a list of numbers, each at least `least`."""
    requirement, of_none = f"hold one or more numbers of at least {least}", -math.inf
    if may_be_empty:
        requirement, of_none = f"hold numbers of at least {least}", math.inf
    return {BOUND: Bound(lambda values: min(values, default=of_none) >= least, requirement)}


def each_named() -> dict[str, Bound]:
    """Returns the metadata of a field that is a list of names or paths, none of them empty."""
    requirement = "be a list of paths or names, none of them empty"
    return {BOUND: Bound(lambda names: all(isinstance(x, str) and x.strip() for x in names), requirement)}


def each_value_of(choices: Sequence[str]) -> dict[str, Bound]:
    """Returns the metadata of a field that maps names to some of the choices."""
    requirement = f"give each name one of {', '.join(choices)}"
    return {BOUND: Bound(lambda given: set(given.values()) <= set(choices), requirement)}


def directory_path(*, default: T) -> T:
    """Declare the path of a directory, which need not exist, or None. Empty paths, files and the root are refused."""
    return _bounded(
        _is_directory_path,
        "name a directory",
        "choose a path that is not a file, a link to nothing or the root, nor below a file; an empty one would be the "
        "working directory",
        default,
    )


def _is_directory_path(path: str) -> bool:
    if not path.strip() or any(lexists(each) and not each.is_dir() for each in (Path(path), *Path(path).parents)):
        return False  # `resolve` does not end well in a loop of links
    return Path(path).resolve() != Path(path).resolve().parent


def share(*, default: T, hint: str, is_proper: bool = False) -> T:
    """Declare a share above 0 and at most 1, or below 1 if it is proper, or None if its type allows that."""
    if is_proper:
        return _bounded(lambda value: 0.0 < value < 1.0, "be above 0 and below 1", hint, default)
    return _bounded(lambda value: 0.0 < value <= 1.0, "be above 0 and at most 1", hint, default)


def _bounded(holds: Callable[[Any], bool], requirement: str, hint: str, default: T) -> T:
    return field(default=default, metadata={BOUND: Bound(holds, requirement, hint)})


def bounded_settings(settings: Any, prefix: str = "") -> dict[str, tuple[Bound, Any]]:
    """Returns the bound and value of every bounded field, by dotted name, including those of nested dataclasses.

    A field whose type allows None has no bound if it is None.
    """
    bounded: dict[str, tuple[Bound, Any]] = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            bounded |= bounded_settings(value, f"{prefix}{each.name}.")
        elif BOUND in each.metadata and value is not None:
            bounded[prefix + each.name] = each.metadata[BOUND], value
    return bounded


def check_bounds(settings: Any) -> None:
    for name, (bound, value) in bounded_settings(settings).items():
        if isinstance(value, int) and value >= 2**63 and bound.holds(value):
            raise UserError(f"{name}: must be below 2**63, but is {value}; correct it")
        if not bound.holds(value):
            raise UserError(f"{name}: must {bound.requirement}, but is {value!r}; {bound.hint}")
