"""Which architectures a build is for, and which of them each kernel file is compiled for."""

import re

import pytest

from build_tools.shared import BuildError, build

SM90 = build.CSRC / "sm90" / "fwd_sm90.cu"
SM80 = build.CSRC / "sm80" / "fwd_sm80.cu"
SIMT = build.CSRC / "simt" / "fwd_simt.cu"


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("80;90a", ["80", "90a"]),
        ("8.0 9.0", ["80", "90a"]),  # wgmma exists in 90a only
        ("80+PTX,sm_90a", ["80+ptx", "90a"]),
        ("80@90;8.6@9.0", ["80@90", "86@90"]),  # older code for a newer GPU
        ("none", []),
    ],
)
def test_environment_decides(monkeypatch, text, archs):
    monkeypatch.setenv("FLASH_EXT_ARCHS", text)
    assert build.architectures([(12, 0)]) == archs


def test_else_the_gpus_present_else_two(monkeypatch):
    monkeypatch.delenv("FLASH_EXT_ARCHS", raising=False)
    assert build.architectures([(9, 0), (8, 6), (9, 0)]) == ["86", "90a"]
    assert build.architectures([]) == ["80+ptx", "90a"]


def test_wrong_architecture_is_an_error(monkeypatch):
    for text in ("hopper", "80@", "80@90+ptx"):
        monkeypatch.setenv("FLASH_EXT_ARCHS", text)
        with pytest.raises(BuildError, match=f"'{re.escape(text)}' is no architecture"):
            build.architectures([])


def test_each_file_is_compiled_only_where_it_has_code():
    archs = ["75", "80+ptx", "90a", "120", "75@90", "80@90"]
    assert build.archs_of(SM90, archs) == ["90a"]
    assert build.archs_of(SM80, archs) == ["80+ptx", "90a", "120", "80@90"]
    assert build.archs_of(SIMT, archs) == archs


def test_gencode_flags():
    assert build.gencode(["80+ptx", "90a", "75@90"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_75,code=sm_90",
    ]


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("80", (8, 0), True),
        ("80", (8, 6), True),
        ("86", (8, 0), False),
        ("80", (9, 0), False),
        ("80+ptx", (9, 0), True),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("80@90", (9, 0), True),
        ("80@90", (8, 0), False),
    ],
)
def test_runs_on(arch, capability, runs):
    assert build.runs_on(arch, capability) is runs


def test_every_row_has_a_kernel_file_and_every_file_a_row():
    from flash_ext import jit

    module = jit.extension()
    files = [build.sources_of_row(module.row_name(row)) for row in range(len(module.instances()))]
    assert all(len(of_row) > 1 for of_row in files)
    assert set().union(*files) == set(build.kernel_sources())


def test_a_head_dim_between_the_files_is_in_the_next_one():
    for arch in ("sm80", "sm90"):
        name = f"bwd {arch} bf16 160 any_mask any_layout plain"
        assert [file.stem for file in build.sources_of_row(name)] == [f"bwd_{arch}_d192", "launch"]


def test_options_are_part_of_general_rows_alone():
    general, plain = (f"bwd sm90 bf16 256 any_mask any_layout {variant}" for variant in ("general", "plain"))
    assert [file.stem for file in build.sources_of_row(general)] == ["bwd_sm90_d256", "bwd_sm90_options", "launch"]
    assert [file.stem for file in build.sources_of_row(plain)] == ["bwd_sm90_d256", "launch"]


def test_every_row_is_in_a_build_for_hopper():
    from flash_ext import jit

    if "90a" not in jit.facts().get("archs", []):
        pytest.skip("this build is not for sm_90a")
    module = jit.extension()
    missing = [module.row_name(row) for row in range(len(module.instances())) if not module.is_built(row)]
    assert not missing
