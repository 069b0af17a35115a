"""What covering arrays leave to the night."""

from itertools import product

import pytest
from covering import covering_array

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from covering import leave_others_to_the_night

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    leave_others_to_the_night(items)
"""
CASES = """
import pytest

{mark}
@pytest.mark.parametrize("backbone", ["bert", "gpt2"])
@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize(("mechanism", "budget"), [("cct", 0.5), ("cct", 1), ("mae", None)])
def test_all(backbone, padding, mechanism, budget):
    print(backbone, padding, mechanism, budget)
"""
MARKS = {"": 18, "@pytest.mark.covering": 3, "@pytest.mark.covering(pairs=True)": 9}


@pytest.mark.parametrize(("mark", "number"), MARKS.items())
def test_cases_that_are_left_have_every_value_or_pair(mark, number, pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    covering\n    nightly")
    pytester.makepyfile(CASES.format(mark=mark))
    result = pytester.runpytest_inprocess("-m", "not nightly", "-p", "no:xdist", "-s")
    result.assert_outcomes(passed=number, deselected=18 - number)


def test_an_array_has_every_pair():
    cases = {each: frozenset(product(enumerate(each), repeat=2)) for each in product("abc", "de", "fg")}
    array = covering_array(cases)
    assert frozenset().union(*(cases[each] for each in array)) == frozenset().union(*cases.values())
    assert len(array) == 6
