"""A machine on which `--precision auto` means bf16, or one on which it does not."""

import torch


def pretend_bf16(monkeypatch, bf16: bool) -> None:
    for place, name in (
        (torch.cpu, "_is_amx_tile_supported"),
        (torch.cpu, "_is_avx512_bf16_supported"),
        (torch.cuda, "is_bf16_supported"),
    ):
        monkeypatch.setattr(place, name, lambda: bf16)
