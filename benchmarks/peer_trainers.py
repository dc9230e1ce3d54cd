"""The train steps that ours is timed against: a padded loop as one writes it, and TRL's loss path.

All take the same completions, advantages and old log-probs, add up the gradients of micro-batches
of 8 rows, clip to norm 1 and make one AdamW step. The loss is the clipped one, over all tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import PAD
from shardloop import hf

MICRO_BATCH = 8
CLIP = 0.2
LR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a step trains on, row by row."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    advantages: Sequence[float]
    old: Sequence[Sequence[float]]
    """Log-probs of the completions' tokens, a little off the policy's, so that some are clipped."""

    @property
    def num_scored(self) -> int:
        return sum(len(row) for row in self.completions)

    @property
    def num_tokens(self) -> int:
        return self.num_scored + sum(len(row) for row in self.prompts)


def right_padded(rows: Sequence[Sequence[Any]], *, fill: Any) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


class _Step:
    """One optimizer step; subclasses say what a micro-batch's loss is."""

    def __init__(self, model: Any, given: Given) -> None:
        self.model, self.given = model, given
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def __call__(self) -> None:
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def forward_backward(self) -> float:
        """Gradients of the whole batch, and its loss."""
        self._optimizer.zero_grad()
        total = 0.0
        for loss in self.losses():
            loss.backward()
            total += loss.item()
        return total

    def losses(self) -> Iterator[Tensor]:
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


class PaddedLoop(_Step):
    """Rows in the order given, padded to the longest of each micro-batch; the logits of every token
    are kept, and the log-softmax beside them."""

    def __init__(self, folder: Path, given: Given) -> None:
        super().__init__(hf.load_model(folder, dtype=torch.float32).eval(), given)

    def losses(self) -> Iterator[Tensor]:
        for start in range(0, len(self.given.prompts), MICRO_BATCH):
            yield self._loss(slice(start, start + MICRO_BATCH))

    def _loss(self, rows: slice) -> Tensor:
        given = self.given
        pairs = list(zip(given.prompts[rows], given.completions[rows], strict=True))
        ids_BT = right_padded([[*prompt, *answer] for prompt, answer in pairs], fill=PAD)
        seen_BT = right_padded([[1] * (len(p) + len(a)) for p, a in pairs], fill=0)
        mask_BT = right_padded([[0.0] * len(p) + [1.0] * len(a) for p, a in pairs], fill=0.0)
        old = zip(pairs, given.old[rows], strict=True)
        old_BT = right_padded([[0.0] * len(p) + list(values) for (p, _), values in old], fill=0.0)
        logits_BTV = self.model(input_ids=ids_BT, attention_mask=seen_BT).logits
        logprobs_BTV = logits_BTV[:, :-1].log_softmax(-1)
        new_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
        advantages_B1 = torch.tensor(given.advantages[rows])[:, None]
        ratio_BT = ((new_BT - old_BT[:, 1:]) * mask_BT[:, 1:]).exp()
        clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
        loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        return (loss_BT * mask_BT[:, 1:]).sum() / given.num_scored


class TRLStep(_Step):
    """GRPOTrainer's own loss on micro-batches as it cuts them: prompts padded on the left,
    completions on the right to the longest of the whole batch."""

    def __init__(self, folder: Path, given: Given, *, out: Path, checkpointing: bool) -> None:
        num_micro_batches = -(-len(given.prompts) // MICRO_BATCH)
        self._trainer = make_trl_trainer(
            folder,
            out=out,
            prompts=given.prompts,
            num_generations=MICRO_BATCH,
            accumulation=num_micro_batches,
            gradient_checkpointing=checkpointing,
            max_completion_length=max(len(row) for row in given.completions),
        )
        self._trainer.current_gradient_accumulation_steps = num_micro_batches
        super().__init__(self._trainer.model.train(), given)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._inputs = self._padded()

    def _padded(self) -> dict[str, Tensor]:
        given = self.given
        width = max(len(row) for row in given.prompts)
        left = [(width - len(row), row) for row in given.prompts]
        return {
            "prompt_ids": torch.tensor([[PAD] * pad + list(row) for pad, row in left]),
            "prompt_mask": torch.tensor([[0] * pad + [1] * len(row) for pad, row in left]),
            "completion_ids": right_padded(given.completions, fill=PAD),
            "completion_mask": right_padded([[1] * len(r) for r in given.completions], fill=0),
            "old_per_token_logps": right_padded(given.old, fill=0.0),
            "advantages": torch.tensor(given.advantages),
        }

    def losses(self) -> Iterator[Tensor]:
        for start in range(0, len(self.given.prompts), MICRO_BATCH):
            rows = slice(start, start + MICRO_BATCH)
            inputs = {name: values[rows] for name, values in self._inputs.items()}
            inputs["num_items_in_batch"] = torch.tensor(self.given.num_scored)
            yield self._trainer.compute_loss(self.model, inputs)


def make_trl_trainer(
    folder: Path,
    *,
    out: Path,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    accumulation: int,
    gradient_checkpointing: bool,
    max_completion_length: int,
    **options: Any,
) -> Any:
    """TRL's GRPOTrainer with its default settings, but for float32 on the CPU and no reports.

    `options` are `reward_funcs`, `callbacks` and further settings of its GRPOConfig.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.models import as_text

    reward = options.pop("reward_funcs", no_reward)
    callbacks = options.pop("callbacks", None)
    settings = {
        "per_device_train_batch_size": MICRO_BATCH,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "max_grad_norm": 1.0,
    } | options
    config = GRPOConfig(
        output_dir=str(out),
        num_generations=num_generations,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=gradient_checkpointing,
        max_completion_length=max_completion_length,
        **settings,
    )
    return GRPOTrainer(
        model=hf.load_model(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": as_text(ids)} for ids in prompts]),
        callbacks=callbacks,
    )


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
