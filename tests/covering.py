"""Covering arrays: of a test's cases, few that have every value of every parameter, or every pair.

    @pytest.mark.covering            # each value of each parameter
    @pytest.mark.covering(pairs=True)  # each pair of values of two parameters

The others are nightly. Tests of other names have other cases, so that together they have most.
"""

from itertools import combinations
from zlib import crc32

import pytest


def leave_others_to_the_night(items):
    """Mark as nightly what the covering arrays of the collected tests leave out."""
    cases = {}
    for item in items:
        if (mark := item.get_closest_marker("covering")) is not None:
            size = 2 if mark.kwargs.get("pairs") else 1
            cases.setdefault((item.path, item.originalname, size), []).append(item)
    for (*_, size), of_one_test in cases.items():
        # in an order that the test's name decides
        of_one_test.sort(key=lambda item: crc32(item.name.encode()))
        values = {item: _values(item.callspec.params, size) for item in of_one_test}
        for item in values.keys() - set(covering_array(values)):
            item.add_marker(pytest.mark.nightly)


def covering_array(values):
    """Few keys whose values are those of all keys: each of them adds the most."""
    left, chosen = set().union(*values.values()), []
    while left:
        best = max(values, key=lambda key: len(values[key] & left))
        left -= values[best]
        chosen.append(best)
    return chosen


def _values(parameters, size):
    named = [(name, repr(value)) for name, value in parameters.items()]
    return frozenset(combinations(named, min(size, len(named))))
