"""The trainer of stage 4: every draft step of the unrolled drafter against the target's distribution."""

import contextlib
import copy
import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
)
from trl.experimental.gkd import GKDTrainer

from osprey.modeling import Acceptance, check_target
from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.callbacks import LogLine, SilentProgress, StopAtNan
from osprey.train.completions import drafter_completion, target_completion
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.feature_data import EpochSampler, FeatureDataset, RowSubset, collate
from osprey.train.features import check_head, read_target
from osprey.train.losses import divergence, normalised_head, normalised_teacher
from osprey.train.muon import MuonAdamW
from osprey.train.precision import autocast
from osprey.train.unroll import Chains, accepted_lengths, find_chains, unroll, walk_rounds


class OspreyDistillationTrainer(GKDTrainer):
    """Distils an `OspreyDrafterForCausalLM` from its target.

    Args:
        model: the drafter.
        args: the settings.
        train_dataset: rows of a `FeatureDataset` (offline), or of an `ExampleDataset` with a `teacher_model` (online).
        eval_dataset: rows of the same kind, which the target wrote greedily.
        teacher_model: the target, where it runs in the step.
    """

    def __init__(
        self,
        model: OspreyDrafterForCausalLM,
        args: OspreyDistillationConfig,
        train_dataset: RowSubset,
        eval_dataset: RowSubset | None = None,
        teacher_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        model.embed_tokens.requires_grad_(not args.freeze_embeddings)
        if model.config.tie_word_embeddings:  # the head is the embedding, or a copy of its rows that is made at load
            model.lm_head.requires_grad_(not args.freeze_embeddings and not model.has_tied_shortlist)
        # Past the constructors of GKDTrainer and SFTTrainer: they want a teacher even for prepared data, tokenise the
        # rows in their own way, and give the model a head that a drafter's forward does not fit.
        Trainer.__init__(
            self,
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collate,
            **kwargs,
        )
        self.loss_is_scaled_for_ga = False  # the loss is a mean: gradient accumulation has to average it
        self.maybe_activation_offload_context = contextlib.nullcontext()  # nothing is offloaded
        self.lmbda, self.seq_kd, self.teacher_model = args.lmbda, args.seq_kd, teacher_model
        if teacher_model is None:
            head = self._offline_head(train_dataset.dataset)
        else:
            check_target(model, teacher_model)
            teacher_model.eval().requires_grad_(False)
            head = check_head(teacher_model, train_dataset[0]["input_ids"].tolist())
            self._set_generation_config()
            self.full_head = head.to(args.device)  # [V, H]
        draft_ids = model.draft_ids.cpu()
        self.teacher_head = normalised_head(head.cpu()[draft_ids]).to(args.device)  # [D, H+2]
        self.draft_index = torch.full((model.config.vocab_size + 1,), -1)  # target id (-1 too) to row of the head
        self.draft_index[draft_ids] = torch.arange(len(draft_ids))
        self.draft_index = self.draft_index.to(args.device)
        self._sums: dict[str, Tensor] = {}  # of the steps since the last log
        self._tokens, self._since = 0, time.perf_counter()
        self._log_to_stderr()

    def _offline_head(self, features: FeatureDataset) -> Tensor:
        if self.lmbda > 0 or self.seq_kd:
            raise ValueError("lmbda and seq_kd need the target in the step: give --target and --data, not --features.")
        refuse_other_target(self.model, features)
        return features.head()

    def _set_generation_config(self) -> None:
        """What `GKDTrainer.training_step` hands to `generate_on_policy_outputs`."""
        args = self.args
        self.generation_kwargs = {
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
        }
        self.generation_config = GenerationConfig(
            **self.generation_kwargs,
            eos_token_id=self.teacher_model.generation_config.eos_token_id,
            pad_token_id=self.teacher_model.generation_config.pad_token_id or 0,
        )

    def _log_to_stderr(self) -> None:
        """One line a log through `logging`, instead of the Trainer's dictionaries on standard output."""
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(SilentProgress)
        self.add_callback(LogLine)
        self.add_callback(StopAtNan)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        args = self.args
        if not args.muon:
            return super().create_optimizer(model)
        if self.optimizer is None:
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonAdamW(
                self.model,
                args.learning_rate,
                args.other_learning_rate,
                betas,
                args.weight_decay,
                context_lr=args.context_learning_rate,
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(rows, self.train_dataset.lengths(), seed)

    def generate_on_policy_outputs(
        self, model: PreTrainedModel, inputs: dict[str, Any], generation_config: GenerationConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's prompts with completions of `model`'s, the drafter or the target: ids, mask and labels `[B, T]`.

        Both write with `osprey.train.completions`, since a drafter cannot generate without its target. `GKDTrainer`
        puts what is returned into the batch; the drafter's loss reads `response_mask` and `lengths` instead.
        """
        drafter = self.accelerator.unwrap_model(self.model)
        write = target_completion if model is self.teacher_model else drafter_completion
        if drafter.has_tied_shortlist:
            drafter.tie_weights()  # drafts are written with the head, a copy of what the last step may have changed
            drafter.embed_tokens.requires_grad_(not self.args.freeze_embeddings)  # tying fixes the embedding
        was_training = drafter.training
        drafter.eval()
        sequences, prompts = [], []
        for ids, mask, length in zip(inputs["input_ids"], inputs["response_mask"], inputs["lengths"], strict=True):
            prompts.append(int(mask.nonzero()[0]) if mask.any() else int(length))
            prompt = ids[None, : prompts[-1]].to(self.teacher_model.device)
            config = copy.deepcopy(generation_config)
            sequences.append(write(self.teacher_model, drafter, prompt, config)[0].to(ids.device))
        drafter.train(was_training)
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # [B, T]
        positions = torch.arange(ids.shape[1], device=ids.device)
        inputs["lengths"] = torch.tensor([len(sequence) for sequence in sequences], device=ids.device)
        inside = positions < inputs["lengths"][:, None]
        inputs["response_mask"] = inside & (positions >= torch.tensor(prompts, device=ids.device)[:, None])
        return ids, inside, ids.masked_fill(~inputs["response_mask"], -100)

    def with_target(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch with what the target says to it: as it stands (offline), or from a forward of it (online)."""
        if self.teacher_model is None:
            return inputs
        return inputs | read_target(
            self.teacher_model,
            self.full_head,
            inputs["input_ids"],
            inputs["response_mask"],
            self.model.config.target_layer_ids,
            self.args.precision,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args = self.args
        inputs = self.with_target(inputs)
        chains = find_chains(inputs["response_mask"], args.unroll_steps, args.unroll_fraction)
        with autocast(args.precision, args.device.type):
            results = self.draft(inputs, chains, inputs["top1"], first_step_everywhere=True)
        if not torch.isfinite(results.loss):
            raise ValueError(
                f"The loss of step {self.state.global_step + 1} is {results.loss.item()}, in the batch of the rows "
                f"{', '.join(map(str, inputs['ids']))}: go on from the last checkpoint in {args.output_dir} with a "
                "lower learning rate."
            )
        steps = torch.arange(args.unroll_steps, device=results.row_step.device)
        counts = (results.row_step[:, None] == steps).sum(0)  # [K]
        self._track("step_loss", results.sums(results.losses), counts)
        self._track("top1", results.sums(results.hits), counts)
        self._tokens += int(inputs["lengths"].sum())
        return (results.loss, {"loss": results.loss}) if return_outputs else results.loss

    def draft(
        self, inputs: dict[str, Tensor], chains: Chains, labels: Tensor, first_step_everywhere: bool
    ) -> "DraftResults":
        """Runs the unrolled drafter on a batch and compares every draft with the target's distribution.

        Args:
            inputs: a collated batch, with what the target says to it.
            chains: the anchors; steps k >= 1 are compared at these only.
            labels: `[B, T]`, for every position the token after it that counts as a hit; -1: none does.
            first_step_everywhere: compare step 0 wherever it predicts a response token, not only at anchors.
        """
        args, drafter = self.args, self.accelerator.unwrap_model(self.model)
        outputs = unroll(drafter, inputs["input_ids"], inputs["taps"].float(), chains, args.unroll_steps)
        length = inputs["input_ids"].shape[1]
        device = outputs[0].device
        students, places, row_steps, weights = [], [], [], []
        for step, hidden in enumerate(outputs):
            if step == 0 and first_step_everywhere:
                batch, position = inputs["response_mask"][:, 2:].nonzero(as_tuple=True)  # position t predicts t + 2
                students.append(hidden[batch, position])  # [P_0, h]
            else:
                batch, column = (chains.num_steps > step).nonzero(as_tuple=True)
                position = chains.anchors[batch, column]
                students.append(hidden[batch, position if step == 0 else column])  # [P_k, h]
            places.append(batch * length + position + 1 + step)  # where the target predicts the same token
            rows = len(position)
            row_steps.append(torch.full((rows,), step, device=device))
            weights.append(torch.full((rows,), args.unroll_decay**step / max(rows, 1), device=device))
        place = torch.cat(places)  # [P]
        loss, losses, hits = divergence(
            drafter.norm(torch.cat(students)),
            drafter.head_weight,
            normalised_teacher(inputs["hidden"].flatten(0, 1)[place], inputs["logsumexp"].flatten()[place]),
            self.teacher_head,
            self.draft_index[labels.flatten()[place]],
            torch.cat(weights),
            args.beta,
            args.loss_chunk_size,
        )
        return DraftResults(loss, losses, hits, torch.cat(row_steps), args.unroll_steps)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Loss, agreement by draft step, and the simulated mean acceptance length on the held-out rows.

        The simulation drafts at every position of a response that the target wrote greedily and walks through it as
        generation would: a draft token is accepted if it is the response's own. What it leaves out is the target's
        rounding, the limit on the drafter's confidence, which ends drafts early, and drafts that are copied from the
        text so far. MAL counts the bonus token and not the prefill (DESIGN §3).
        """
        dataset, steps = self.eval_dataset if eval_dataset is None else eval_dataset, self.args.unroll_steps
        start = time.perf_counter()
        answers, loss = self.simulate(dataset)
        rounds: dict[str, list[tuple[int, int]]] = {}  # by language
        tries, hits = [0] * steps, [0] * steps
        for index, answer in answers.items():
            rounds.setdefault(dataset.rows[index]["language"] or "?", []).extend(walk_rounds(answer.accepted, steps))
            for k in range(steps):
                tries[k] += sum(a >= k and n > k for a, n in zip(answer.accepted, answer.num_steps, strict=True))
                hits[k] += sum(a > k for a in answer.accepted)
        metrics = {"loss": loss, "mal": mal(sum(rounds.values(), []))}
        metrics |= {f"acceptance_{k}": hits[k] / max(tries[k], 1) for k in range(steps)}
        metrics |= {f"mal_{name}": mal(some) for name, some in sorted(rounds.items(), key=lambda item: -len(item[1]))}
        metrics["runtime"] = time.perf_counter() - start
        metrics = {f"{metric_key_prefix}_{name}": round(value, 4) for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._since += time.perf_counter() - start  # not a time in which tokens are learnt
        return metrics

    @torch.no_grad()
    def simulate(self, dataset: RowSubset) -> tuple[dict[int, "Simulated"], float]:
        """What a draft from every position of each answer would bring, by index in `dataset`; and the mean loss."""
        was_training = self.model.training
        self.model.eval()
        answers: dict[int, Simulated] = {}
        loss, batches = 0.0, 0
        order = sorted(range(len(dataset)), key=lambda i: dataset.rows[i]["length"])
        for begin in range(0, len(order), self.args.eval_batch_size):
            indices = order[begin : begin + self.args.eval_batch_size]
            inputs = self.with_target(self._prepare_inputs(collate([dataset[i] for i in indices])))
            chains = find_chains(inputs["response_mask"], self.args.unroll_steps)
            with autocast(self.args.precision, self.args.device.type):
                own_tokens = nn.functional.pad(inputs["input_ids"][:, 1:], (0, 1), value=-1)  # [B, T]
                results = self.draft(inputs, chains, own_tokens, first_step_everywhere=False)
            loss, batches = loss + float(results.loss), batches + 1
            accepted = accepted_lengths(results.hits_by_chain(chains))  # [B, A]
            for row, index in enumerate(indices):
                real = chains.num_steps[row] > 0  # [A]
                answers[index] = Simulated(accepted[row][real].tolist(), chains.num_steps[row][real].tolist())
        self.model.train(was_training)
        return answers, loss / max(batches, 1)

    def _track(self, name: str, sums: Tensor, counts: Tensor) -> None:
        entry = torch.stack([sums.detach(), counts.to(sums.dtype)])  # [2, K]
        self._sums[name] = self._sums[name] + entry if name in self._sums else entry

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, not an evaluation or the summary
            for name, (sums, counts) in self._sums.items():
                for step, mean in enumerate((sums / counts.clamp(min=1)).tolist()):
                    logs[f"{name}_{step}"] = round(mean, 4)
            now = time.perf_counter()
            logs["tokens_per_second"] = round(self._tokens / (now - self._since), 1)
            self._sums.clear()
            self._tokens, self._since = 0, now
        Trainer.log(self, logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        Trainer._save_checkpoint(self, model, trial)  # TRL would write a card of its own into every checkpoint


@dataclass
class DraftResults:
    """Comparison of P drafts with the target; the rows of a step stand together, steps rising."""

    loss: Tensor  # scalar: sum over steps of decay^k x mean loss
    losses: Tensor  # [P], nats
    hits: Tensor  # [P], whether the drafter's most likely token is the label
    row_step: Tensor  # [P], draft step
    num_steps: int

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` `[P]` by draft step, `[K]`."""
        return torch.zeros(self.num_steps, device=values.device).index_add_(0, self.row_step, values.float())

    def hits_by_chain(self, chains: Chains) -> Tensor:
        """The hits as bool `[B, A, K]`, False past a chain's end; all steps must have been compared at anchors."""
        steps = torch.arange(self.num_steps, device=chains.anchors.device)
        drafted = chains.num_steps > steps[:, None, None]  # [K, B, A], the order of the rows
        return torch.zeros_like(drafted).masked_scatter(drafted, self.hits).permute(1, 2, 0)


@dataclass
class Simulated:
    """One answer, and a draft from each of its positions in turn.

    Attributes:
        accepted: draft tokens that are the answer's own, up to the first that is not.
        num_steps: draft tokens that could be compared: fewer than drafted at the answer's end.
    """

    accepted: list[int]
    num_steps: list[int]


def mal(rounds: list[tuple[int, int]]) -> float:
    return Acceptance(rounds).mean_acceptance_length


def refuse_other_target(drafter: OspreyDrafterForCausalLM, features: FeatureDataset) -> None:
    """Raises `ValueError` if the features come from another target, as far as the drafter's config knows its own."""
    config = drafter.config
    wanted = {
        "target_layer_ids": config.target_layer_ids,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_hidden_layers,
        "target_vocab_size": config.vocab_size,
    }
    if re.fullmatch("[0-9a-f]{40}", config.target_revision or "") and features.settings.get("target_revision"):
        wanted["target_revision"] = config.target_revision  # a commit; branches and tags have no fixed meaning
    if "/" in (config.target or "") and "/" in features.settings["target"]:  # ids on the Hub; folders have any name
        wanted["target"] = config.target
    for name, value in wanted.items():
        found = features.settings.get(name)
        if found != value:
            raise ValueError(
                f"The features have {name} {found} but the drafter has {value}: prepare features of the drafter's own "
                "target and taps."
            )
