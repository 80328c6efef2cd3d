"""The CUDA toolkit is found by its headers, and each way of not finding one has its message."""

import pytest

from build_tools.shared import BuildError, build


def test_no_toolkit_is_no_error(bare_machine):
    assert build.find_toolkit("13.0") is None


def test_nvcc_on_path_may_be_a_wrapper_script(bare_machine, make_toolkit, write_program):
    root = make_toolkit("13.0")
    write_program(bare_machine / "nvcc", f'exec {root}/bin/nvcc "$@"')
    toolkit = build.find_toolkit("13.0")
    assert (toolkit.root, toolkit.version) == (root, (13, 0))


def test_folder_without_headers_is_no_toolkit(bare_machine, make_toolkit, write_program):
    root = make_toolkit("13.0", headers=False)
    write_program(bare_machine / "nvcc", f'exec {root}/bin/nvcc "$@"')
    assert build.find_toolkit("13.0") is None


def test_headers_may_lie_under_targets(bare_machine, make_toolkit, monkeypatch):
    root = make_toolkit("13.0", headers=False)
    include = root / "targets" / "x86_64-linux" / "include"
    include.mkdir(parents=True)
    (include / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert build.find_toolkit("13.0").root == root


def test_toolkit_of_torchs_major_version_is_preferred(bare_machine, make_toolkit, monkeypatch):
    roots = [make_toolkit("12.8"), make_toolkit("13.0")]
    monkeypatch.setattr(build, "usual_roots", lambda: roots)
    assert build.find_toolkit("13.0").version == (13, 0)
    assert build.find_toolkit("12.6").version == (12, 8)
    assert build.find_toolkit(None).version == (12, 8)


def test_wrong_cuda_home_names_a_right_one(bare_machine, make_toolkit, monkeypatch):
    root = make_toolkit("13.0")
    monkeypatch.setattr(build, "usual_roots", lambda: [root])
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(
        BuildError, match=rf"CUDA_HOME=/nowhere is not a CUDA toolkit.* Set CUDA_HOME to {root}, or unset it"
    ):
        build.find_toolkit("13.0")


def test_unset_cuda_home_finds_the_usual_folder(bare_machine, make_toolkit, monkeypatch):
    root = make_toolkit("13.0")
    monkeypatch.setattr(build, "usual_roots", lambda: [root])
    assert build.find_toolkit("13.0").root == root


def test_nvcc_too_old(bare_machine, make_toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("12.1")))
    with pytest.raises(
        BuildError, match=r"too old: CUDA 12\.1 .* at least 12\.6 .* set CUDA_HOME .*FLASH_EXT_ARCHS=none"
    ):
        build.find_toolkit("12.6")


def test_other_major_version_than_torch(bare_machine, make_toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("12.8")))
    with pytest.raises(
        BuildError, match=r"torch is built for CUDA 13\.0, but the toolkit is CUDA 12\.8 .* install a CUDA 13"
    ):
        build.find_toolkit("13.0")
