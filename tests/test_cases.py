"""Every case of ``cases.py`` on every path."""

from __future__ import annotations

import cases
import pytest

from flash_ext.testing import check, poison


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, path: str, device: str) -> None:
    on_gpu, on_cpu = cases.CASES[name]
    problem = (on_gpu if device == "cuda" else on_cpu).problem(device)
    with poison():
        check_what_is_served(problem, path)


def check_what_is_served(problem, path: str) -> None:
    """A path may have no backward, or no kernel at all, for a call; another one serves it then."""
    try:
        check(problem, path)
    except NotImplementedError as error:
        try:
            check(problem, path, backward=False)
        except NotImplementedError:
            pytest.skip(str(error))


@pytest.mark.parametrize("name", cases.BEHAVIOURS)
def test_behaviour(name: str, path: str, device: str) -> None:
    try:
        with poison():
            cases.BEHAVIOURS[name](device)
    except NotImplementedError as error:
        pytest.skip(str(error))
