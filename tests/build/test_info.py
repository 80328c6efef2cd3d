"""python -m flash_ext.info can be pasted into a bug report, whatever is installed."""

import torch

from flash_ext import info, jit


def test_report_names_versions_device_and_kernels():
    report = "\n".join(info.lines())
    assert torch.__version__ in report
    assert "device" in report and "kernels" in report and "toolkit now" in report


def test_report_survives_an_extension_that_cannot_be_loaded(monkeypatch):
    def broken():
        raise ImportError("undefined symbol")

    monkeypatch.setattr(jit, "extension", broken)
    assert "extension   undefined symbol" in info.lines()
