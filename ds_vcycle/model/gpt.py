"""A level of a GPT: Megatron's GPTModel that returns summed losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_vcycle.levels import ModelShape
from ds_vcycle.model.distillation import Teaching, token_losses
from ds_vcycle.model.loss import VocabShard
from ds_vcycle.parallel import Mesh


class Gpt(GPTModel):
    """Megatron's parameters and layers; the forward pass is for pretraining on full sequences only."""

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, shape: ModelShape, mesh: Mesh
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.padded_vocab,
            max_sequence_length=shape.sequence_length,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="learned_absolute" if shape.position == "learned" else "rope",
        )
        self.vocab_shard = VocabShard.of(shape, mesh)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, teaching: Teaching | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss over a micro-batch.

        Args:
            tokens: int64 [b, s].
            labels: int64 [b, s], the token to predict at each position.
            weights: float32 [b, s].
            teaching: what a teacher's :meth:`predictions` are for this batch, if one has a part in the loss.

        Returns:
            (sum of weight x loss, 0): float32 scalars.
        """
        lm_sum = token_losses(self.logits(tokens), labels.t(), weights.t(), self.vocab_shard, teaching)
        return lm_sum, lm_sum.new_zeros(())

    def predictions(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits at the predicted positions of a batch, all of them: [s, b, padded vocabulary / TP]."""
        return self.logits(batch["tokens"])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's vocabulary slice, pad columns included: [s, b, padded vocabulary / TP]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        embedded = self.embedding(input_ids=tokens, position_ids=positions)
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=self._rotary(tokens.shape[1]))
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(hidden, weight=weight)[0]
        return logits

    def _rotary(self, length: int) -> torch.Tensor | None:
        """Angles [s, 1, 1, head_dim]. Megatron caches them per class, which would keep past levels' modules alive."""
        if self.position_embedding_type != "rope":
            return None
        if length not in self.rotary_pos_emb_cache:
            self.rotary_pos_emb_cache[length] = self.rotary_pos_emb.get_emb(length)
        angles: torch.Tensor = self.rotary_pos_emb_cache[length]
        return angles
