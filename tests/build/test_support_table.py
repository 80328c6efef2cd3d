"""The README's table of kernels is the table in csrc/instances.h."""

from build_tools import support_table
from flash_ext import jit


def test_rows_that_differ_in_dtype_and_head_dim_share_a_line():
    rows = [(0, 2, dtype, dim, dim, 3, 2, 0) for dtype in (1, 2) for dim in (64, 128)] + [(1, 0, 0, 192, 128, 3, 2, 2)]
    lines = support_table.table(rows).splitlines()[2:]
    assert lines[0].startswith("| `sm90` (Hopper) | forward | fp16, bf16 | 64, 128 | all | dense and packed | plain |")
    assert lines[1].startswith("| `simt` (any GPU) | backward | fp32 | 192/128 |")


def test_readme_is_current():
    current = support_table.current_readme(jit.extension().instances())
    assert support_table.README.read_text() == current, "run: python -m build_tools.support_table --write"
