"""The sm_80 backward kernels where their own design could break: head dims between the kernels', whose rows are loaded by
elements, and how blocks share a group of heads. (What Hopper's could get wrong too: tests/test_tensor_cores.py.)"""

from __future__ import annotations

import pytest
from problems import packed_problem, problem

from flash_ext.testing import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [20, 37, 72, 104, 249])
def test_head_dims_between(head_dim):
    check(problem(100, 150, (head_dim, head_dim), causal=True), "sm80")


@pytest.mark.parametrize("head_dim", [37, 64, 96, 128, 249, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_queries_end_inside_of_sequences(head_dim, causal):
    """Blocks whose copies are whole, end early or go by elements follow each other; some sequences have a single one."""
    lengths = [70, 0, 300, 65, 129], [90, 130, 17, 260, 64]
    check(packed_problem(*lengths, head_dim, tail=9, causal=causal), "sm80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_block_takes_a_group_of_heads(head_dim):
    """Where there are tiles of keys enough."""
    check(problem(70, 8000, (head_dim, head_dim), (16, 8)), "sm80")
