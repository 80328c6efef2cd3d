"""What the README says: its table of kernels is that of csrc/instances.h, plots and links exist, its example runs."""

import re

import pytest

from build_tools import readme
from flash_ext import jit


def test_rows_that_differ_in_dtype_and_head_dim_share_a_line():
    rows = [(0, 2, dtype, dim, dim, 3, 2, 0) for dtype in (1, 2) for dim in (64, 128)] + [(1, 0, 0, 192, 128, 3, 2, 2)]
    lines = readme.table(rows).splitlines()[2:]
    assert lines == [
        "| `sm90` (Hopper) | forward | fp16, bf16 | 64, 128 | all | dense, packed | sinks |",
        "| `simt` (any GPU) | backward | fp32 | 192/128 | all | dense, packed | any of them |",
    ]


def test_dtypes_that_take_other_options_have_a_line_of_their_own():
    rows = [(0, 2, dtype, 64, 64, 3, 2, variant) for dtype in (2, 3) for variant in (0, 1)]
    options = {line.split(" | ")[2]: line.split(" | ")[-1][:-2] for line in readme.table(rows).splitlines()[4:]}
    assert len(readme.table(rows).splitlines()) == 2 + 4
    assert options == {"bf16": "softcap, ALiBi, bias, sinks, dropout", "fp8 e4m3": "softcap, sinks"}


def test_only_recorded_plots_are_shown(tmp_path):
    assert readme.plots(["fwd.png", "bwd.png"], tmp_path) == ""
    (tmp_path / "fwd.png").touch()
    assert readme.plots(["fwd.png", "bwd.png"], tmp_path).endswith("(docs/plots/fwd.png)")


def test_readme_is_current():
    current = readme.current_readme(jit.extension().instances())
    assert readme.README.read_text() == current, "run: make format"
    assert readme.MEASURED.read_text() == readme.current_measured(), "run: make format"


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/install.md", "docs/measured.md", "bench/NOTES.md"]


@pytest.mark.parametrize("name", [*PAGES, "examples/README.md"])
def test_links_lead_somewhere(name):
    path = readme.ROOT / name
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_example_runs():
    example = re.search(r"```python\n(.*?)```", readme.README.read_text(), re.DOTALL)[1]
    small = example.replace("2, 4096, 16, 128", "1, 40, 2, 16").replace('"cuda"', '"cpu"')
    assert small != example
    values = {}
    exec(small, values)
    assert values["q"].grad.shape == values["q"].shape and values["lse"].shape == (1, 2, 40)
