"""One rank of the trainer: log-probs, gradients, updates, checkpoints. Floor 3.

Worker groups build one on every rank. All get the same global batch and take their own rows of it:

    batch ──Share──▶ own micro-batches ──policy──▶ log-probs  ┐ added up over ranks:
                                           └──loss──▶ metrics ┘ the answer
    forward_backward (any number) ──▶ gradients, summed over ranks ──▶ step ──▶ weights

Every pass runs in eval mode: the same rows give the same log-probs, bit for bit, with and without
gradients, so the ratio of new to old is exactly 1 before the first update.

Shape letters: N tokens of the batch, n scored tokens of a micro-batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop import hf
from shardloop.checkpoint import Saver, SaveReport, load_checkpoint
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.errors import PolicyDiverged, UsageError
from shardloop.families import canonical_model
from shardloop.invariant import Kernels
from shardloop.layout import Layout, make_layout
from shardloop.micro_batches import Share, needs_silent_rows, without_silent_rows
from shardloop.objective import check_batch, grpo_objective, sft_objective
from shardloop.parallel.agree import together
from shardloop.parallel.build import build_policy
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor, local_tensor, sum_gradients_in_next_backward
from shardloop.parallel.grad_norm import global_grad_norm, scale_gradients
from shardloop.parallel.mesh import data_place, make_mesh, tp_place
from shardloop.parallel.observed import check_placed
from shardloop.policy import Policy
from shardloop.rl.batch import Batch
from shardloop.rl.packing import PackedRows

PolicyName = Literal["current", "reference"]


class Trainer:
    """Policy, optional reference policy and AdamW, cut over the ranks of one role.

    Collective over the role's group: the constructor and every method but `shards`, `layout`,
    `is_saving` and `advance_version`; all ranks call them in the same order with the same
    arguments.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        model_dir: Path,
        config: TrainerConfig,
        optim: OptimConfig,
        reference: bool,
        role: str = "trainer",
        kernels: Kernels = "fast",
    ) -> None:
        """
        Args:
            model_dir: weights to start from, and the tokenizer that `export` copies.
            reference: keep a frozen copy of the policy as it is now.
            kernels: "invariant" makes log-probs equal to those of an engine built so, bit for bit.
        Raises:
            ModelError: the folder is no usable model.
            LayoutError: `config.layout` is none for a trainer, of another number of ranks, or has
                a tp that does not fit the model.
            UsageError: sequence parallelism without tp; invariant kernels that cannot run here.
        """
        group = context.group(role)
        self.version = 0
        """Optimizer batches applied: `step` leaves it alone, `advance_version` adds one."""
        self._group = group
        self._saver = Saver(group, timeout_s=context.collective_timeout_s)
        self._device = context.device
        self._config = config
        self._model_dir = model_dir
        self._hf_config = hf.load_config(model_dir)
        self._mesh = make_mesh(
            config.layout,
            group=group,
            device_type=context.device.type,
            timeout_s=context.collective_timeout_s,
        )
        self._share = self._build_share()
        self._kernels: Kernels = kernels
        self._speaks = tp_place(self._mesh)[0] == 0
        """Ranks that differ in tp alone compute the same values: one of them hands them out."""
        self._policy = self._build_policy()
        weights = dict(self._policy.named_parameters())
        check_placed(self.layout(), weights, ranks=dist.get_process_group_ranks(group))
        self._reference = self._build_policy().requires_grad_(False) if reference else None
        self._optim = optim
        self._optimizer = self._build_optimizer()

    def _build_policy(self) -> Policy:
        return build_policy(
            self._model_dir,
            self._config,
            mesh=self._mesh,
            device=self._device,
            kernels=self._kernels,
        )

    def _build_share(self) -> Share:
        config, (_, tp) = self._config, tp_place(self._mesh)
        place, num_places = data_place(self._mesh)
        return Share(
            place=place,
            num_places=num_places,
            row_tokens=config.row_tokens,
            rows_per_micro_batch=config.rows_per_micro_batch,
            multiple=tp if config.sequence_parallel else 1,
        )

    def _build_optimizer(self) -> torch.optim.AdamW:
        optim, parameters = self._optim, list(self._policy.parameters())
        optimizer = torch.optim.AdamW(
            parameters,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        # Made now instead of in the first step, so that a fresh optimizer has the same keys in a
        # checkpoint as a used one, and no dummy step has to create (and advance) them.
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        return optimizer

    def advance_version(self) -> int:
        """Counts one applied batch, however many steps were made on it; returns the new version."""
        self.version += 1
        return self.version

    def _require_reference(self) -> Policy:
        if self._reference is None:
            raise UsageError("this trainer keeps no reference policy; build it with reference=True")
        return self._reference

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, policy: PolicyName = "current") -> Tensor:
        """Log-probs [N] of the batch's scored tokens at its temperature, on the CPU.

        0 outside the loss mask, for rows of other ranks, and on all but the first of the ranks that
        share their rows (tp): the sum over ranks is the answer. float64 if the trainer computes in
        it, else float32.

        Raises:
            PolicyDiverged: a log-prob is not finite; on the ranks that have such rows.
        """
        model = self._policy if policy == "current" else self._require_reference()
        wide = torch.promote_types(getattr(torch, self._config.dtype), torch.float32)
        logprobs_N = torch.zeros(len(batch.token_ids_N), dtype=wide)
        for packed in self._share.with_signal(batch) + self._share.silent(batch):
            logprobs_n, _ = self._score(model, packed, batch.temperature)
            logprobs_N[packed.flat_index_n] = logprobs_n.cpu()
        if not bool(logprobs_N.isfinite().all()):
            raise PolicyDiverged(
                f"log-probs of the {policy} policy are not finite at version {self.version}; "
                "it has diverged, or overflows its dtype: lower the learning rate"
            )
        return logprobs_N if self._speaks else torch.zeros_like(logprobs_N)

    def forward_backward(self, batch: Batch, loss: GRPOConfig | Literal["sft"]) -> dict[str, float]:
        """Adds the gradients of one batch to those already there.

        Denominators of the loss are the whole batch's: packing and number of ranks do not matter.
        Rows without any advantage are passed over unless a KL or entropy term needs them: their
        gradient is 0.

        Returns:
            Metrics whose sum over ranks is `loss` of the whole batch, and the mean over the loss
            tokens that were not passed over of `entropy`, and for GRPO also `policy_loss` (like
            `loss`), `clip_fraction`, `approx_kl`, `ratio`, `kl`.
        Raises:
            UsageError: the batch lacks values that the loss needs.
        """
        check_batch(batch, loss)
        micro_batches = self._share.with_signal(batch)
        if needs_silent_rows(loss):
            micro_batches += self._share.silent(batch)
        else:
            batch = without_silent_rows(batch)
        totals: dict[str, float] = {}
        for index, packed in enumerate(micro_batches, start=1):
            sum_gradients_in_next_backward(self._policy, now=index == len(micro_batches))
            new_n, entropy_n = self._score(self._policy, packed, batch.temperature)
            if loss == "sft":
                objective, parts = sft_objective(new_n, batch)
            else:
                objective, parts = grpo_objective(new_n, entropy_n, batch, packed, loss)
            torch.autograd.backward(objective)
            parts["loss"] = objective.detach()
            parts["entropy"] = entropy_n.detach().sum() / max(1, batch.num_loss_tokens)
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + (value.item() if self._speaks else 0.0)
        return totals

    def _score(
        self, model: Policy, packed: PackedRows, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs_n, entropy_n = model(
            packed.input_ids_BT.to(self._device),
            packed.position_ids_BT.to(self._device),
            packed.segment_ids_BT.to(self._device),
            packed.target_positions_n.to(self._device),
            packed.target_ids_n.to(self._device),
            temperature=temperature,
        )
        return logprobs_n, entropy_n

    def step(self, lr: float) -> dict[str, float]:
        """One AdamW update at learning rate `lr` with the gradients so far, then drops them.

        Returns:
            grad_norm before clipping, the same on every rank.
        Raises:
            PolicyDiverged: the gradient is not finite; on every rank, the weights as they were.
            UsageError: there are no gradients.
        """
        parameters = list(self._policy.parameters())
        if any(parameter.grad is None for parameter in parameters):
            raise UsageError("step without gradients; call forward_backward first")
        norm = global_grad_norm(parameters)
        if not bool(norm.isfinite()):
            self._optimizer.zero_grad()
            raise PolicyDiverged(
                f"gradient norm is {norm.item()} at version {self.version}; the update was not "
                "made: lower the learning rate, or look for non-finite advantages or log-probs"
            )
        scale_gradients(parameters, max_norm=self._optim.max_grad_norm, norm=norm)
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"grad_norm": norm.item()}

    def shards(self) -> dict[str, Tensor]:
        """This rank's part of every weight by Hugging Face name: live storage, even of 0 rows."""
        return {name: local_tensor(weight) for name, weight in self._policy.named_parameters()}

    def layout(self) -> Layout:
        """Where the elements of `shards` lie in the model."""
        return make_layout(canonical_model(self._hf_config), self._config.layout)

    def save(
        self,
        path: Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        background: bool = False,
    ) -> None:
        """Write weights, moments, reference and version, with the driver's `extra` beside them.

        That is all the state there is: the learning rate is an argument of `step`, and nothing here
        draws random numbers.

        Args:
            keep: newest checkpoints that stay in the folder of `path`; None: all.
            background: return as soon as all of it is copied, and write while training goes on.
                A save before is waited for.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact. In the background it is
                the next `save` or `finish_save` that raises it.
        """
        self._saver.save(
            path,
            self._checkpoint_state(),
            version=self.version,
            extra=extra or {},
            keep=keep,
            background=background,
        )

    def is_saving(self) -> bool:
        """Whether this rank still writes a checkpoint in the background."""
        return self._saver.is_writing()

    def finish_save(self) -> SaveReport | None:
        """Waits for the last save and tells its seconds; None if that was told already.

        Raises:
            CheckpointError: on every rank; it has failed, earlier checkpoints are intact.
        """
        return self._saver.finish()

    def load(self, path: Path) -> dict[str, Any]:
        """Take all of that from a checkpoint of any number of ranks; returns the driver's `extra`.

        Raises:
            CheckpointError: on every rank; it does not fit this trainer, or cannot be read; or a
                save in the background has failed.
        """
        self._saver.finish()
        restored = load_checkpoint(path, self._checkpoint_state(), group=self._group)
        self._optimizer.zero_grad()
        self.version = restored.version
        return restored.extra

    def _checkpoint_state(self) -> dict[str, Tensor]:
        """Live tensors by key; loading writes into them."""
        state: dict[str, Tensor] = {}
        for name, weight in self._policy.named_parameters():
            state[f"model.{name}"] = weight.detach()
            for moment, value in self._optimizer.state[weight].items():
                state[f"optim.{moment}.{name}"] = value
        if self._reference is not None:
            for name, weight in self._reference.named_parameters():
                state[f"reference.{name}"] = weight.detach()
        return state

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder with the tokenizer of `model_dir`.

        Weights are gathered one at a time, and rank 0 writes each before the next.

        Raises:
            CheckpointError: on every rank; the folder cannot be written.
        """
        weights = list(self._policy.named_parameters())
        gathered = (full_tensor(weight) for _, weight in weights)
        is_first = dist.get_rank(self._group) == 0

        def write() -> None:
            hf.write_hf_folder(
                path,
                config=self._hf_config,
                specs={name: hf.TensorSpec(tuple(w.shape), w.dtype) for name, w in weights},
                read=lambda _: next(gathered).cpu(),
                tokenizer_from=self._model_dir,
            )

        def take_part() -> None:
            try:
                if is_first:
                    write()
            finally:  # also where writing failed: the other ranks wait in every gather
                for _ in gathered:
                    pass

        together(self._group, take_part, path=path)
