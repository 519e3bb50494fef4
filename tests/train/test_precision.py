"""Which precision `auto` means."""

import pytest
import torch

from osprey.train.precision import compute_dtype, use_bf16


@pytest.mark.parametrize(("amx", "avx512"), [(True, True), (True, False), (False, True), (False, False)])
def test_auto_is_bf16_where_a_cpu_multiplies_it(amx, avx512, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert use_bf16("auto", "cpu") == (amx or avx512)
    assert compute_dtype("auto", "cpu") == (torch.bfloat16 if amx or avx512 else torch.float32)


def test_a_named_precision_stands():
    assert use_bf16("bf16", "cpu") and not use_bf16("fp32", "cpu")
    with pytest.raises(ValueError, match="'half' is unknown: choose one of auto, bf16, fp32"):
        use_bf16("half", "cpu")
