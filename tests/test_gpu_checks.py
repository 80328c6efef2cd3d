"""The command that runs everything on a GPU: what it starts, and that it notices what fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import gpu_checks
import pytest
from gpu_checks import Check, last_word, run, run_all

from flash_ext.dispatch import CUDA_PATHS


def python(code: str, limit: float = 60, name: str = "x") -> Check:
    return Check("tests", name, (sys.executable, "-c", code), limit)


def test_what_fails_or_hangs_is_noticed(tmp_path):
    assert not run(python("print('12 passed')"), tmp_path).failed
    outcome = run(python("print('1 failed'); raise SystemExit(1)"), tmp_path)
    assert outcome.failed and "1 failed" in str(outcome)
    hanging = run(python("import time; print('waits', flush=True); time.sleep(60)", limit=2), tmp_path)
    assert hanging.failed and hanging.status is None and "out of time" in str(hanging)


def test_stages_follow_each_other(tmp_path):
    mark = tmp_path / "mark"
    first = python(f"import time; time.sleep(0.5); open({str(mark)!r}, 'w')", name="first")
    second = python(f"open({str(mark)!r})", name="second")
    assert not any(outcome.failed for outcome in run_all([[first], [second]], [python("", name="beside")], 4, tmp_path))


def test_every_path_is_under_every_tool():
    for tool in ("memcheck", "synccheck", "racecheck"):
        commands = [check.command for check in gpu_checks.sanitizers() if check.group == tool]
        paths = {command[command.index("--path") + 1] for command in commands}
        assert paths == set(CUDA_PATHS), tool
        assert any("e4m3" in command for command in commands)
    assert {check.command[3] for check in gpu_checks.random_problems(1, 0, 1)} == set(CUDA_PATHS)


@pytest.mark.parametrize(
    ("log", "last"),
    [
        ("..\n=== 12 passed in 3 s ===\n", "12 passed in 3 s"),
        ("========= ERROR SUMMARY: 0 errors\n55 problems ran\n", "ERROR SUMMARY: 0 errors"),
        ("", "(nothing)"),
    ],
)
def test_last_word(log, last):
    assert last_word(log) == last


def test_unknown_group(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_checks.main(["--out", str(tmp_path), "memchek"])
    assert "group must be of tests, memcheck" in capsys.readouterr().err


def test_shares_are_all_tests(request):
    here = str(gpu_checks.ROOT / "tests" / "conftest.py")
    hook = next(
        plugin.pytest_collection_modifyitems
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == here
    )
    shares = []
    for i in range(3):
        items = [SimpleNamespace(number=n, get_closest_marker=lambda _: None) for n in range(7)]
        hook(SimpleNamespace(getoption=lambda _, i=i: f"{i}/3"), items)
        shares.append([item.number for item in items])
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
