"""The drafter's forwards in a draft: one over the positions that verification made known, then one a draft step.

`DynamicRunner` keeps keys and values that grow with the text. `StaticRunner` computes the same over buffers of one
size, in shapes that never change, so that `torch.compile` compiles a draft step once and a GPU replays it as a graph.
"""

import threading
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from .layers_osprey import BufferedLayer

MASKED_ATTENTION = ("sdpa", "eager")  # implementations that take a ready mask
STATIC_ROWS = 16  # rows of a static read: as many positions as verification makes known in most rounds, padded
LEAST_CAPACITY = 1024  # few sizes of buffers, a power of two each: for each the functions are compiled anew


class DynamicRunner:
    """Runs over as many positions as there are.

    Attributes:
        num_cached: positions whose keys and values come from the target's states. Those of draft steps, which come
            from guesses, lie behind them until the next `read`.
    """

    def __init__(self, drafter: PreTrainedModel):
        self.drafter = drafter
        self.cache = Cache(layer_class_to_replicate=BufferedLayer)
        self.num_cached = self.num_steps = 0

    def read(self, tokens: torch.LongTensor, taps: torch.Tensor, ahead: int) -> torch.Tensor:
        """The state of the last position, `[1, 1, h]`, from tokens `[1, T]` and taps `[1, T, 3H]` of the next ones.

        `ahead`: draft steps that may follow.
        """
        drafter, start, known = self.drafter, self.num_cached, tokens.shape[1]
        self.cache.crop(-self.num_steps)
        self.num_cached, self.num_steps = start + known, 0
        context = drafter.project_taps(taps)  # [1, T, h]
        positions = torch.arange(start, start + known + ahead, device=tokens.device)[None]
        rotary = drafter.rotary_emb(context, positions)  # cosines and sines of the whole round, at once
        self.rotary_ahead = tuple(part[:, known:] for part in rotary)
        return drafter.run_layers(
            tokens,
            context,
            self.causal_mask(start, known),
            cache=self.cache,
            position_embeddings=tuple(part[:, :known] for part in rotary),
            last_only=True,
        )

    def step(self, token: torch.LongTensor, state: torch.Tensor) -> torch.Tensor:
        """The state of the next position, `[1, 1, h]`, from its token `[1, 1]` and the state before it."""
        at = tuple(part[:, self.num_steps : self.num_steps + 1] for part in self.rotary_ahead)
        self.num_steps += 1
        return self.drafter.run_layers(token, state, cache=self.cache, position_embeddings=at)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Scores over the draft vocabulary, `[1, D]`, of the state (`[1, 1, h]`) that came last."""
        return self.drafter.draft_logits(state)[:, -1]

    def causal_mask(self, start: int, length: int) -> torch.Tensor | None:
        """Which of `start + length` keys each of the last `length` positions sees, `[1, 1, length, start + length]`.

        None where the attention function sees to it; for a few positions transformers' general way costs more than
        the attention.
        """
        if start == 0 or length == 1 or self.drafter.config._attn_implementation not in MASKED_ATTENTION:
            return None
        ones = torch.ones(length, start + length, dtype=torch.bool, device=self.drafter.device)
        return ones.tril(start)[None, None]


class StaticRunner:
    """Runs over padded rows and buffers of one size, compiled where the drafter's generation config lets.

    Which is what it means in transformers: on an accelerator, unless `disable_compile` is set, with `compile_config`.
    What has not been computed yet is masked, and what a padded row leaves behind is overwritten before it is seen.
    """

    def __init__(self, drafter: PreTrainedModel, buffers: "StaticBuffers"):
        self.drafter, self.cache = drafter, buffers.cache
        self.read_rows, self.read_row = buffers.read_rows, buffers.read_row
        self.num_cached = 0

    def read(self, tokens: torch.LongTensor, taps: torch.Tensor, ahead: int) -> torch.Tensor:
        """As `DynamicRunner.read`; only what is longer than `STATIC_ROWS`, a prompt, has a shape of its own."""
        known = tokens.shape[1]
        place = torch.tensor([self.num_cached, known], device=tokens.device)
        self.num_cached += known
        if known > STATIC_ROWS:
            state, self.last_logits = read_rows(self.drafter, self.cache, tokens, taps, place)
            return state
        padding = STATIC_ROWS - known
        tokens, taps = nn.functional.pad(tokens, (0, padding)), nn.functional.pad(taps, (0, 0, 0, padding))
        state, logits = self.read_rows(self.drafter, self.cache, tokens, taps, place)
        self.last_logits = logits.clone()  # the next replay of a graph writes where this one wrote
        return state.clone()

    def step(self, token: torch.LongTensor, state: torch.Tensor) -> torch.Tensor:
        """As `DynamicRunner.step`."""
        token = token.clone(
            memory_format=torch.contiguous_format
        )  # of a longer row, whose stride would be compiled in
        state, logits = self.read_row(self.drafter, self.cache, token, state)
        self.last_logits = logits.clone()
        return state.clone()

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """As `DynamicRunner.logits`; computed with the state."""
        return self.last_logits


def read_rows(
    drafter: PreTrainedModel,
    cache: Cache,
    tokens: torch.LongTensor,  # [1, R], those after the first `known` are padding
    taps: torch.Tensor,  # [1, R, 3H]
    place: torch.LongTensor,  # [2]: first position, known
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of the last known position, `[1, 1, h]`, and its scores, `[1, D]`; later steps follow it."""
    start, known = place  # [], []
    for layer in cache.layers:
        layer.cumulative_length.copy_(start)
    positions = start + torch.arange(tokens.shape[1], device=tokens.device)  # [R]
    states = run_static(drafter, cache, tokens, drafter.project_taps(taps), positions)  # [1, R, h]
    for layer in cache.layers:
        layer.cumulative_length.copy_(start + known)
    state = states.index_select(1, known[None] - 1)  # [1, 1, h]
    return state, drafter.draft_logits(state)[:, -1]


def read_row(
    drafter: PreTrainedModel, cache: Cache, token: torch.LongTensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft step: state `[1, 1, h]` and scores `[1, D]` from the token `[1, 1]` and the state before."""
    positions = cache.layers[0].cumulative_length.clone()[None]  # [1]
    state = run_static(drafter, cache, token, state, positions)  # [1, 1, h]
    return state, drafter.draft_logits(state)[:, -1]


def run_static(
    drafter: PreTrainedModel,
    cache: Cache,
    tokens: torch.LongTensor,  # [1, R]
    context: torch.Tensor,  # [1, R, h]
    positions: torch.LongTensor,  # [R]
) -> torch.Tensor:
    """The drafter's blocks over `R` positions, each of which sees all of the buffers up to itself; `[1, R, h]`."""
    keys = torch.arange(cache.layers[0].max_cache_len, device=tokens.device)  # [S]
    mask = (keys <= positions[:, None])[None, None]  # [1, 1, R, S]
    return drafter.run_layers(tokens, context, mask, position_ids=positions[None], cache=cache)


class StaticBuffers:
    """Keys and values of `capacity` positions for a drafter, and the functions that are compiled for them."""

    def __init__(self, drafter: PreTrainedModel, capacity: int):
        config = drafter.config
        self.capacity = capacity
        with torch.inference_mode(False):  # else a later call outside of inference mode could not write to them
            self.cache = Cache(layers=[StaticLayer(capacity + STATIC_ROWS) for _ in range(config.num_hidden_layers)])
            self.cache.early_initialization(
                1, config.num_key_value_heads, config.head_dim, drafter.dtype, drafter.device
            )
        self.read_rows, self.read_row = read_rows, read_row
        self.compile_config = wanted_compilation(drafter)
        if self.compile_config is not None:
            options = self.compile_config.to_dict()
            self.read_rows, self.read_row = torch.compile(read_rows, **options), torch.compile(read_row, **options)

    def fit(self, drafter: PreTrainedModel, capacity: int) -> bool:
        like = self.cache.layers[0].keys
        same_place = (like.device, like.dtype) == (drafter.device, drafter.dtype)
        return same_place and self.compile_config == wanted_compilation(drafter) and self.capacity >= capacity


def wanted_compilation(drafter: PreTrainedModel) -> CompileConfig | None:
    """How the drafter's generation config would have it compiled; None for not at all."""
    own = drafter.generation_config
    config = own.compile_config if own.compile_config is not None else CompileConfig()
    # transformers compiles on these, and elsewhere for who asks with this switch.
    can = drafter.device.type in ("cuda", "xpu") or config._compile_all_devices
    return config if can and not own.disable_compile else None


def check_cache_implementation(drafter: PreTrainedModel) -> None:
    """Raise `ValueError` where the drafter's generation config names a cache that it cannot draft with."""
    implementation, attention = drafter.generation_config.cache_implementation, drafter.config._attn_implementation
    if implementation not in (None, "dynamic", "static"):
        raise ValueError(
            f"The drafter's generation config has cache_implementation {implementation!r}, but a drafter drafts with "
            "'dynamic', its default, or 'static': set one of them."
        )
    if implementation == "static" and attention not in MASKED_ATTENTION:
        raise ValueError(
            "A drafter with cache_implementation 'static' needs attention that takes a mask, but its "
            f"attn_implementation is {attention!r}: load it with 'sdpa', or leave cache_implementation out."
        )


_static = threading.local()  # a graph is bound to its buffers: each thread keeps a drafter's from call to call


def new_runner(drafter: PreTrainedModel, capacity: int) -> DynamicRunner | StaticRunner:
    """A runner for a text of at most `capacity` positions, as the drafter's `cache_implementation` has it."""
    if drafter.generation_config.cache_implementation != "static":
        return DynamicRunner(drafter)
    if not hasattr(_static, "buffers"):
        _static.buffers = WeakKeyDictionary()
    buffers = _static.buffers.get(drafter)
    if buffers is None or not buffers.fit(drafter, capacity):
        power_of_two = 1 << (max(capacity, LEAST_CAPACITY) - 1).bit_length()
        _static.buffers[drafter] = buffers = StaticBuffers(drafter, power_of_two)
    return StaticRunner(drafter, buffers)
