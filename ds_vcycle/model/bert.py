"""A level of a BERT, pre-LN or post-LN: Megatron's BertModel with its head at the masked positions only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from ds_vcycle.levels import ModelShape
from ds_vcycle.model.distillation import Teaching, token_losses
from ds_vcycle.model.loss import VocabShard
from ds_vcycle.model.options import ACTIVATIONS
from ds_vcycle.parallel import Mesh


class Bert(BertModel):
    """Megatron's parameters and layers; the forward pass is for pretraining only."""

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, shape: ModelShape, mesh: Mesh
    ) -> None:
        super().__init__(
            config=config,
            num_tokentypes=2,
            transformer_layer_spec=spec,
            vocab_size=shape.padded_vocab,
            max_sequence_length=shape.sequence_length,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            add_binary_head=shape.sentence_order,
        )
        self.norms_embedding = shape.norm_placement == "post"
        if self.norms_embedding:
            # The original's order is sum, norm, dropout. Megatron's embedding ends with its dropout, which moves out.
            self.embedding.layernorm = WrappedTorchNorm(config, shape.hidden, eps=config.layernorm_epsilon)
            self.dropout, self.embedding.embedding_dropout = self.embedding.embedding_dropout, torch.nn.Identity()
        self.lm_head.gelu = ACTIVATIONS["gelu_tanh" if shape.activation == "gelu_tanh" else "gelu"]
        self.vocab_shard = VocabShard.of(shape, mesh)

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        """Megatron derives the mask's form from Transformer Engine's version, and fails without it."""
        return "b11s"

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor,
        padding_mask: torch.Tensor,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        sentence_order: torch.Tensor | None = None,
        teaching: Teaching | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the losses over a micro-batch.

        Args:
            tokens: int64 [b, s].
            token_types: int64 [b, s], 0 or 1.
            padding_mask: bool or float [b, s], true at real tokens.
            masked_positions: int64 [b, P]; unused slots hold any position and weight 0.
            labels: int64 [b, P], the tokens to predict there.
            weights: float32 [b, P].
            sentence_order: int64 [b], 0 in order, 1 swapped; with the sentence-order head only.
            teaching: what a teacher's :meth:`predictions` are for this batch, if one has a part in the token loss.

        Returns:
            (sum of weight x masked-token loss, sum of sentence-order losses or 0): float32 scalars.
        """
        hidden = self.encode(tokens, token_types, padding_mask)
        logits = self._masked_logits(hidden, masked_positions)
        lm_sum = token_losses(logits, labels.t(), weights.t(), self.vocab_shard, teaching)
        if self.binary_head is None:
            assert sentence_order is None, "this level has no sentence-order head"
            return lm_sum, lm_sum.new_zeros(())
        assert sentence_order is not None
        return lm_sum, functional.cross_entropy(self.order_logits(hidden).float(), sentence_order, reduction="sum")

    def predictions(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits at the predicted positions of a batch, the masked ones: [P, b, padded vocabulary / TP]."""
        hidden = self.encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
        return self._masked_logits(hidden, batch["masked_positions"])

    def encode(self, tokens: torch.Tensor, token_types: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm: [s, b, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        embedded = self.embedding(input_ids=tokens, position_ids=positions, tokentype_ids=token_types)
        if self.norms_embedding:
            embedded = self.dropout(self.embedding.layernorm(embedded))
        hidden: torch.Tensor = self.encoder(
            hidden_states=embedded, attention_mask=~padding_mask.bool()[:, None, None, :]
        )
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's vocabulary slice, pad columns included: [n, b, hidden] -> [n, b, padded / TP]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: torch.Tensor = self.output_layer(self.lm_head(hidden_states=hidden), weight=weight)[0]
        return logits

    def _masked_logits(self, hidden: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        index = masked_positions.t()[:, :, None].expand(-1, -1, hidden.shape[2])
        return self.logits(hidden.gather(0, index))

    def order_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Sentence-order logits [b, 2] from the first token's hidden state."""
        logits: torch.Tensor = self.binary_head(self.pooler(hidden, 0))
        return logits
