"""Patterns that name layers: regular expressions from config.json and the command line."""

import re

from anybit.errors import CheckpointError

LONGEST_PATTERN = 256
MOST_REPETITIONS = 3


def is_wild(pattern: str) -> bool:
    """Whether a shell pattern can match more than the name that it is."""
    return any(mark in pattern for mark in "*?[")


def check_pattern(pattern: str, place: str) -> None:
    """Raise CheckpointError for a regular expression that is invalid, or could backtrack exponentially.

    Repeated groups, or many repetitions, can: such patterns are refused by their form, before they are ever matched.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise CheckpointError(f"{place} has a pattern of {len(pattern)} characters; {LONGEST_PATTERN} are allowed")
    plain = re.sub(r"\\.", "x", pattern)  # an escape matches one character
    plain = re.sub(r"\[[^\]]*\]", "x", plain)  # and so does a set
    # A backslash and a digit are a backreference.
    looped = re.search(r"\)[*+?{]", plain) or re.search(r"\(\?", plain) or re.search(r"\\[0-9]", pattern)
    if looped or len(re.findall(r"[*+{]\??|(?<![*+}])\?", plain)) > MOST_REPETITIONS:
        raise CheckpointError(
            f"{place} has the pattern {pattern!r}, which may backtrack forever: at most {MOST_REPETITIONS} "
            "repetitions are allowed, none of a group, and no look-around; name the layers instead"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{place} has {pattern!r}, which is not a valid pattern: {error}") from None
