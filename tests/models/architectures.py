"""Small random models of twelve architectures of ``transformers``, each with a batch.

``layers``: of the model, or of each of its halves; the stated tables have two. Where a second layer
reads what the first one has no use for, as the biases of T5, there are two of them always.
"""

import torch
import transformers

Batch = dict[str, torch.Tensor]
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _small(layers: int) -> dict[str, int]:
    return SMALL | {"num_hidden_layers": layers}


def tokens(vocabulary: int = 97, length: int = 13) -> Batch:
    found = torch.randint(3, vocabulary, (2, length))
    return {"input_ids": found, "labels": found}


def gpt2(layers: int = 2):
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=layers, n_head=4
    )
    return transformers.GPT2LMHeadModel(config), tokens()


def llama(layers: int = 2):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokens()


def bert(layers: int = 2):
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=56, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), tokens()


def resnet(layers: int = 2):
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, layers], layer_type="basic", num_labels=7
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.randint(7, (3,))}


def qwen3(layers: int = 2):
    config = transformers.Qwen3Config(**_small(layers), num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config), tokens()


def gemma2(layers: int = 2):
    config = transformers.Gemma2Config(
        **_small(layers), num_key_value_heads=2, head_dim=8, sliding_window=8
    )
    return transformers.Gemma2ForCausalLM(config), tokens()


def mixtral(layers: int = 2):
    """Experts as batched products."""
    config = transformers.MixtralConfig(
        **_small(layers), num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), tokens()


def deberta_v2(layers: int = 2):
    config = transformers.DebertaV2Config(
        **_small(layers), relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_relative_positions=16, position_buckets=8,
    )  # fmt: skip
    return transformers.DebertaV2ForMaskedLM(config), tokens()


def t5(layers: int = 2):
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_decoder_layers=layers,
        num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), tokens()


def vit(layers: int = 2):
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=layers, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.randint(5, (3,))}
    return transformers.ViTForImageClassification(config), batch


def whisper(layers: int = 2):
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=56,
        decoder_ffn_dim=56, num_mel_bins=8,
        max_source_positions=16, max_target_positions=32, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 97, (2, 9))}
    return transformers.WhisperForConditionalGeneration(config), batch


def mamba(layers: int = 2):
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=layers, intermediate_size=32,
        time_step_rank=2,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config), tokens(length=6)


ALL = (gpt2, llama, qwen3, gemma2, mixtral, bert, deberta_v2, t5, vit, resnet, whisper, mamba)

_EXPERTS = SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_experts_per_tok": 2}


def mixtral_by_default():
    """With what its routers say in the loss, which installs hooks at the first call."""
    config = transformers.MixtralConfig(
        **_EXPERTS, num_local_experts=4, output_router_logits=True
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), tokens()


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **_EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config), tokens()


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **_EXPERTS, moe_intermediate_size=16, num_experts=4, head_dim=8
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), tokens()


def olmoe():
    config = transformers.OlmoeConfig(**_EXPERTS, num_experts=4, eos_token_id=2)
    return transformers.OlmoeForCausalLM(config), tokens()


EXPERTS = (mixtral_by_default, qwen2_moe, qwen3_moe, olmoe)
"""Mixtures of experts as their configurations are by default: rows grouped by expert."""
