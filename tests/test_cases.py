"""Every case of ``cases.py`` and ``behaviours.py`` on every path."""

from __future__ import annotations

import behaviours
import cases
import pytest

from flash_ext.testing import check, poison


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, path: str, device: str) -> None:
    on_gpu, on_cpu = cases.CASES[name]
    problem = (on_gpu if device == "cuda" else on_cpu).problem(device)
    with poison():
        if why := check_what_is_served(problem, path):
            pytest.skip(why)


def check_what_is_served(problem, path: str) -> str:
    """A path may have no backward, or no kernel at all, for a call; another one serves it then. Returns why, or ""."""
    for backward in (True, False):
        try:
            check(problem, path, backward)
            return ""
        except NotImplementedError as error:
            why = str(error)
    return why


@pytest.mark.parametrize("name", behaviours.BEHAVIOURS)
def test_behaviour(name: str, path: str, device: str) -> None:
    try:
        with poison():
            behaviours.BEHAVIOURS[name](device)
    except NotImplementedError as error:
        pytest.skip(str(error))
