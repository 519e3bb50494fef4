"""A model for `lighteval custom`: a target that generates with its drafter, scored by any lighteval task.

    lighteval custom "target=FOLDER_OR_HUB_ID,drafter=FOLDER_OR_HUB_ID" eval/lighteval_osprey.py "osprey_everyday|0" \
        --custom-tasks eval/lighteval_tasks.py

Without `drafter=` the target generates alone, through the same code. Scores are the target's own either way; what the
drafter adds, its acceptance, stands in the result file under `config_general.model_config.acceptance`.
"""

from pathlib import Path
from typing import Any

import torch
from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc
from pydantic import ValidationError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import osprey.eval.baselines  # noqa: F401  (their drafters load by AutoModelForCausalLM, as Osprey's do)
from osprey.eval.acceptance import Measurement, greedy_or_sampled, summarize, timed_generate
from osprey.modeling import check_target


class OspreyModelConfig(ModelConfig):
    """What ends up in the result file about the model.

    Attributes:
        target, drafter: local folders or Hub ids; without a drafter the target generates alone.
        acceptance: by task, and `all` over all of them: `requests`, `mal_mean` (mean over requests), `mal_pooled` (all
            tokens emitted by verifications / all verifications) and `acceptance_by_position`.
    """

    target: str
    drafter: str | None = None
    acceptance: dict[str, dict[str, Any]] = {}


def parse_model(arguments: str, **fields) -> OspreyModelConfig:
    """The config for lighteval's usual `key=value,key=value`.

    Raises `ValueError` with one sentence where it is something else.
    """
    try:
        config = OspreyModelConfig(**OspreyModelConfig._parse_args(arguments), **fields)
    except (ValidationError, TypeError, IndexError) as error:
        raise ValueError(
            f"the model {arguments!r} is not of the form target=FOLDER_OR_HUB_ID,drafter=FOLDER_OR_HUB_ID "
            "(without drafter=: the target alone)."
        ) from error
    # The name becomes a folder of results.
    config.model_name = config.model_name or "+".join(
        Path(name).name for name in (config.target, config.drafter) if name
    )
    return config


class NoCache:
    """lighteval wants a cache of answers on the model. There is none: acceptance has to be measured."""

    def _init_registry(self, registry) -> None:
        pass


class OspreyLightevalModel(LightevalModel):
    def __init__(self, config: ModelConfig):
        self.config = parse_model(
            config.model_name,
            generation_parameters=config.generation_parameters,
            system_prompt=config.system_prompt,
        )
        self._cache = NoCache()
        target_path, drafter_path = (
            local_or_hub(name) if name else None for name in (self.config.target, self.config.drafter)
        )
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        dtype = torch.float32 if device.type == "cpu" else "auto"
        self.target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).to(device).eval()
        self.drafter = None
        if drafter_path is not None:
            self.drafter = (
                AutoModelForCausalLM.from_pretrained(drafter_path, dtype=self.target.dtype).to(device).eval()
            )
            check_target(self.drafter, self.target)
        self._tokenizer = AutoTokenizer.from_pretrained(target_path)
        self.prompts = PromptManager(
            use_chat_template=self._tokenizer.chat_template is not None,
            tokenizer=self._tokenizer,
            system_prompt=self.config.system_prompt,
        )
        self.measurements: list[Measurement] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return not self.prompts.use_chat_template  # a template writes its own

    @property
    def max_length(self) -> int:
        """Positions of the target, prompt and answer together."""
        return self.target.config.get_text_config().max_position_embeddings

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Greedy answers, each up to the task's token limit, its stop sequences or the end-of-text token."""
        if self.config.generation_parameters.temperature or any(doc.num_samples > 1 for doc in docs):
            raise ValueError("lighteval_osprey generates greedily: one sample a prompt, at temperature 0.")
        responses = [self.answer(doc) for doc in tqdm(docs, desc="generating", disable=self.disable_tqdm)]
        if self.drafter is not None:
            for task in ["all", *dict.fromkeys(measurement.group for measurement in self.measurements)]:
                self.config.acceptance[task] = acceptance_of(
                    [measurement for measurement in self.measurements if task in ("all", measurement.group)]
                )
        return responses

    def answer(self, doc: Doc) -> ModelResponse:
        prompt = self.tok_encode(self.prompts.prepare_prompt(doc))
        limit = self.max_length - len(prompt) if doc.generation_size is None else doc.generation_size
        limit = min(max(limit, 1), self.max_length - 1)
        kept = prompt[-(self.max_length - limit) :]  # cut on the left, as lighteval does
        input_ids = torch.tensor([kept], device=self.target.device)  # [1, T]
        stops = list(doc.stop_sequences or ())
        run = timed_generate(
            self.target,
            {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)},
            self.drafter,
            max_new_tokens=limit,
            pad_token_id=self.tokenizer.pad_token_id,
            **greedy_or_sampled(0),
            **({"stop_strings": stops, "tokenizer": self.tokenizer} if stops else {}),
        )
        self.measurements.append(Measurement(doc.id, doc.task_name, run))
        text = self.tokenizer.decode(run.token_ids, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return ModelResponse(
            text=[text],
            input_tokens=kept,
            output_tokens=[run.token_ids],
            truncated_tokens_count=len(prompt) - len(kept),
        )

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """The target's log-probability of each choice after the prompt; nothing is drafted."""
        return [self.score(doc) for doc in tqdm(docs, desc="scoring", disable=self.disable_tqdm)]

    @torch.no_grad()
    def score(self, doc: Doc) -> ModelResponse:
        contexts, choices = self.tok_encode_pair(self.prompts.prepare_prompt(doc), doc.choices, pairwise=True)
        logprobs, greedy, longest = [], [], 0
        for context, choice in zip(contexts, choices, strict=True):
            text = torch.tensor([context + choice], device=self.target.device)  # [1, T + 1]
            longest = max(longest, text.shape[1] - 1)
            text = text[:, -(self.max_length + 1) :]  # the last token predicts nothing that is asked for
            choice = text[0, 1:][-len(choice) :]  # [n]
            logits = self.target(input_ids=text[:, :-1], logits_to_keep=len(choice)).logits[0]  # [n, V]
            scores = logits.float().log_softmax(-1)  # [n, V]
            logprobs.append(scores.gather(1, choice[:, None]).sum().item())
            greedy.append(bool((scores.argmax(-1) == choice).all()))
        return ModelResponse(
            input_tokens=contexts[0],
            output_tokens=choices,
            logprobs=logprobs,
            argmax_logits_eq_gold=greedy,
            truncated_tokens_count=max(0, longest - self.max_length),
        )

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        raise ValueError("lighteval_osprey does not run perplexity tasks: in them nothing is generated or chosen.")

    def cleanup(self) -> None:
        if "all" in self.config.acceptance:
            figures = self.config.acceptance["all"]
            mean, pooled = (
                "-" if figures[key] is None else f"{figures[key]:.2f}" for key in ("mal_mean", "mal_pooled")
            )
            print(f"MAL {mean} mean, {pooled} pooled over {figures['requests']} requests")


def acceptance_of(measurements: list[Measurement]) -> dict[str, Any]:
    summary = summarize(measurements)
    return {key: getattr(summary, key) for key in ("requests", "mal_mean", "mal_pooled", "acceptance_by_position")}


def local_or_hub(name: str) -> str:
    """A folder with `~` expanded, or a Hub id; raises `OSError` for a path that is no folder."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and name.startswith(("/", ".", "~")):
        raise OSError(f"there is no model folder {name}.")
    return str(folder) if folder.is_dir() else name
