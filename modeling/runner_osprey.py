"""The drafter's forwards in a draft: one over the positions that verification made known, then one a draft step.

`DynamicRunner` keeps keys and values that grow with the text. `StaticRunner` computes the same over buffers of one
size, in shapes that never change, so that `torch.compile` compiles a draft step once and a GPU replays it as a graph.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from .layers_osprey import BufferedLayer

MASKED_ATTENTION = ("sdpa", "eager")  # implementations that take a ready mask
STATIC_ROWS = 16  # rows of a static read: as many positions as verification makes known in most rounds, padded
LEAST_CAPACITY = 1024  # positions of the smallest buffers; larger ones are powers of two, each compiled for itself


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
            self.causal_mask(start, known, tokens.device),
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

    def release(self) -> None:
        """The call is over."""

    def causal_mask(self, start: int, length: int, device: torch.device) -> torch.Tensor | None:
        """Which of `start + length` keys each of the last `length` positions sees, `[1, 1, length, start + length]`.

        None where the attention function sees to it; for a few positions transformers' general way costs more than
        the attention.
        """
        if start == 0 or length == 1 or self.drafter.config._attn_implementation not in MASKED_ATTENTION:
            return None
        ones = torch.ones(length, start + length, dtype=torch.bool, device=device)
        return ones.tril(start)[None, None]


class StaticRunner:
    """Runs over padded rows and buffers of one size, compiled where the drafter's generation config lets.

    Which is what it means in transformers: on an accelerator, unless `disable_compile` is set, with `compile_config`.
    What has not been computed yet is masked, and what a padded row leaves behind is overwritten before it is seen.
    """

    def __init__(self, drafter: PreTrainedModel, buffers: "StaticBuffers"):
        self.drafter, self.buffers, self.cache = drafter, buffers, buffers.cache
        buffers.user = weakref.ref(self)  # weak: who drives a generator by hand may forget to release it
        self.compiled_read, self.compiled_step = buffers.compiled_read, buffers.compiled_step
        self.num_cached = 0
        for layer in self.cache.layers:
            layer.reset()  # masked values still meet the attention, times zero: a NaN of an earlier call would stay

    def read(self, tokens: torch.LongTensor, taps: torch.Tensor, ahead: int) -> torch.Tensor:
        """As `DynamicRunner.read`; only what is longer than `STATIC_ROWS`, a prompt, has a shape of its own."""
        known = tokens.shape[1]
        start_and_known = torch.tensor([self.num_cached, known], device=tokens.device)
        self.num_cached += known
        if known > STATIC_ROWS:
            state, self.last_logits = static_read(self.drafter, self.cache, tokens, taps, start_and_known)
            return state
        padding = STATIC_ROWS - known
        tokens, taps = nn.functional.pad(tokens, (0, padding)), nn.functional.pad(taps, (0, 0, 0, padding))
        return self.kept(self.compiled_read(self.drafter, self.cache, tokens, taps, start_and_known))

    def step(self, token: torch.LongTensor, state: torch.Tensor) -> torch.Tensor:
        """As `DynamicRunner.step`."""
        # A slice of a longer row: its stride would be compiled in.
        token = token.clone(memory_format=torch.contiguous_format)
        return self.kept(self.compiled_step(self.drafter, self.cache, token, state))

    def kept(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Copies: a graph writes where it wrote before, and one step's output is the next one's input."""
        state, self.last_logits = (output.clone() for output in outputs)
        return state

    def release(self) -> None:
        """The call is over: the buffers are free, whatever still refers to this."""
        self.buffers.user = no_user

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """As `DynamicRunner.logits`; they are computed with each state, also where nobody asks for them."""
        return self.last_logits


def static_read(
    drafter: PreTrainedModel,
    cache: Cache,
    tokens: torch.LongTensor,  # [1, R], those after the first `known` are padding
    taps: torch.Tensor,  # [1, R, 3H]
    start_and_known: torch.LongTensor,  # [2]: the first position, and how many there are
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of the last known position, `[1, 1, h]`, and its scores, `[1, D]`; later steps follow it."""
    start, known = start_and_known  # [], []
    for layer in cache.layers:
        layer.cumulative_length.copy_(start)
    positions = start + torch.arange(tokens.shape[1], device=tokens.device)  # [R]
    states = run_static(drafter, cache, tokens, drafter.project_taps(taps), positions)  # [1, R, h]
    for layer in cache.layers:
        layer.cumulative_length.copy_(start + known)
    state = states.index_select(1, known[None] - 1)  # [1, 1, h]
    return state, drafter.draft_logits(state)[:, -1]


def static_step(
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
    """Keys and values of `capacity` positions for a drafter, and the functions that are compiled for them.

    Attributes:
        user: gives the runner that is using them, if any; they serve one at a time.
    """

    def __init__(self, drafter: PreTrainedModel, capacity: int):
        config = drafter.config
        with torch.inference_mode(False):  # else a later call outside of inference mode could not write to them
            self.cache = Cache(layers=[StaticLayer(capacity + STATIC_ROWS) for _ in range(config.num_hidden_layers)])
            self.cache.early_initialization(
                1, config.num_key_value_heads, config.head_dim, drafter.dtype, drafter.device
            )
        self.compiled_read, self.compiled_step = static_read, static_step
        self.options = compile_options(drafter, self.cache)
        if self.options is not None:
            self.compiled_read = torch.compile(static_read, **self.options)
            self.compiled_step = torch.compile(static_step, **self.options)
        self.user: Callable[[], StaticRunner | None] = no_user

    def fits(self, drafter: PreTrainedModel) -> bool:
        """Whether the drafter is where, in what precision and to be compiled how it was when these were made."""
        like = self.cache.layers[0].keys
        same_place = (like.device, like.dtype) == (drafter.device, drafter.dtype)
        return same_place and self.options == compile_options(drafter, self.cache)


def no_user() -> None:
    """What `StaticBuffers.user` is while they are free."""


def compile_options(drafter: PreTrainedModel, cache: Cache) -> dict[str, Any] | None:
    """What `torch.compile` is given for the drafter, by transformers' own rules; None where it is not compiled."""
    own = drafter.generation_config
    if not drafter._valid_auto_compile_criteria({"cache": cache}, own):
        return None
    options = (own.compile_config or drafter._default_compile_config()).to_dict()
    # Nothing but the buffers' size ever differs, and a graph is recorded for each: no symbolic shapes.
    return options | {"dynamic": False if options["dynamic"] is None else options["dynamic"]}


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


_static = threading.local()  # graphs and what they write to belong to a thread; here it keeps them from call to call


def new_runner(drafter: PreTrainedModel, capacity: int) -> DynamicRunner | StaticRunner:
    """A runner for a text of at most `capacity` positions, as the drafter's `cache_implementation` has it.

    A call inside another one of the same drafter and thread finds the buffers in use, and autocast changes dtypes on
    their way into them: both draft with a growing cache.
    """
    wants_static = drafter.generation_config.cache_implementation == "static"
    if not wants_static or torch.is_autocast_enabled(drafter.device.type):
        return DynamicRunner(drafter)
    if not hasattr(_static, "buffers"):
        _static.buffers = WeakKeyDictionary()
    of_drafter = _static.buffers.setdefault(drafter, {})
    capacity = 1 << (max(capacity, LEAST_CAPACITY) - 1).bit_length()
    if capacity not in of_drafter or not of_drafter[capacity].fits(drafter):
        of_drafter[capacity] = StaticBuffers(drafter, capacity)
    buffers = of_drafter[capacity]
    return StaticRunner(drafter, buffers) if buffers.user() is None else DynamicRunner(drafter)
