"""Hugging Face's models from small random configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import BATCH, Case, sequence_loss, tokens, uneven

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 2, 40

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DECODER = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}

IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 4}


def build(model: str, config: str, **options: Any):
    """Return a function that builds a model, in evaluation mode: dropout is off."""

    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        return getattr(transformers, model)(settings).eval()

    return make


def language_losses(model: nn.Module, batch) -> Tensor:
    ids, targets = batch
    return sequence_loss(model(input_ids=ids, use_cache=False).logits, targets)


def as_long_as_the_batch():
    """As many positions as examples: shape cannot tell them apart."""
    return tokens(BATCH)


def masked_tokens():
    ids, targets = tokens()
    mask = (torch.arange(5) < torch.tensor([[5], [3], [4]])).long()
    return ids * mask, mask, targets


def masked_losses(model: nn.Module, batch) -> Tensor:
    ids, mask, targets = batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets) * mask).sum(1)


def sentences():
    return tokens(8)[0], torch.randint(4, (BATCH,))


def sentence_losses(model: nn.Module, batch) -> Tensor:
    ids, labels = batch
    return functional.cross_entropy(model(input_ids=ids).logits, labels, reduction="none")


def translation():
    source, _ = tokens(6)
    ids, targets = tokens(5)
    return source, ids, targets


def translation_losses(model: nn.Module, batch) -> Tensor:
    source, ids, targets = batch
    out = model(input_ids=source, decoder_input_ids=ids, use_cache=False)
    return sequence_loss(out.logits, targets)


def image():
    return torch.randn(BATCH, 3, 8, 8), torch.randint(4, (BATCH,))


def image_losses(model: nn.Module, batch) -> Tensor:
    pixels, labels = batch
    return functional.cross_entropy(model(pixel_values=pixels).logits, labels, reduction="none")


def sound():
    return torch.randn(BATCH, 200), torch.randint(4, (BATCH,))


def sound_losses(model: nn.Module, batch) -> Tensor:
    samples, labels = batch
    return functional.cross_entropy(model(input_values=samples).logits, labels, reduction="none")


def speech():
    return torch.randn(BATCH, 4, 16), *tokens(5)


def speech_losses(model: nn.Module, batch) -> Tensor:
    features, ids, targets = batch
    out = model(input_features=features, decoder_input_ids=ids, use_cache=False)
    return sequence_loss(out.logits, targets)


def pairs():
    return tokens(5)[0], torch.randn(BATCH, 3, 8, 8)


def tower_losses(model: nn.Module, batch) -> Tensor:
    """A loss for each tower: the contrastive one compares examples and has no per-example form."""
    ids, pixels = batch
    out = model(input_ids=ids, pixel_values=pixels)
    return uneven(out.text_embeds) + 2 * uneven(out.image_embeds)


def images_of_several_sizes():
    return torch.randn(BATCH, 3, 16, 16), torch.tensor([[16, 16], [8, 16], [12, 8]])


def packed_image_losses(model: nn.Module, batch) -> Tensor:
    """The model puts the patches of all images into one row, (1, N, d)."""
    pixels, sizes = batch
    patches = model(pixels, image_sizes=sizes).last_hidden_state[0]
    return torch.cat([uneven(each[None]) for each in patches.split((sizes // 4).prod(1).tolist())])


def mixture(model: str, config: str, **options: Any):
    make = build(model, config, **options)

    def eager() -> nn.Module:
        built = make()
        built.set_experts_implementation("eager")  # the other ones have no double precision
        return built

    return eager


CASES = [
    Case(
        "GPT-2",
        build(
            "GPT2LMHeadModel", "GPT2Config", n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH,
            vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2,
        ),
        tokens,
        language_losses,
    ),
    Case(
        "GPT-2, T = B",
        build(
            "GPT2LMHeadModel", "GPT2Config", n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH,
            vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2,
        ),
        as_long_as_the_batch,
        language_losses,
    ),
    Case(
        "Llama",
        build("LlamaForCausalLM", "LlamaConfig", **DECODER),
        tokens,
        language_losses,
        True,
    ),
    Case(
        "Qwen3",
        build("Qwen3ForCausalLM", "Qwen3Config", **DECODER),
        as_long_as_the_batch,
        language_losses,
        True,
    ),
    Case(
        "Gemma",
        build("GemmaForCausalLM", "GemmaConfig", **DECODER),
        tokens,
        language_losses,
        True,
    ),
    Case(
        "Gemma 3",
        build("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER, sliding_window=4),
        as_long_as_the_batch,
        language_losses,
        True,
    ),
    Case(
        "Mistral",
        build("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=4),
        tokens,
        language_losses,
        True,
    ),
    Case(
        "Mixtral",
        mixture(
            model="MixtralForCausalLM", config="MixtralConfig", **DECODER, num_local_experts=4,
            num_experts_per_tok=2,
        ),
        tokens,
        language_losses,
        True,
    ),
    Case(
        "Mamba",
        build(
            "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=WIDTH,
            state_size=4, num_hidden_layers=LAYERS, conv_kernel=3, time_step_rank=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        as_long_as_the_batch,
        language_losses,
        True,
    ),
    Case("BERT", build("BertForMaskedLM", "BertConfig", **TEXT), masked_tokens, masked_losses),
    Case(
        "Bloom",
        build(
            "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH,
            n_layer=LAYERS, n_head=HEADS, bos_token_id=1, eos_token_id=2,
        ),
        tokens,
        language_losses,
    ),
    Case(
        "DeBERTa v3",
        build(
            "DebertaV2ForSequenceClassification", "DebertaV2Config", **TEXT, num_labels=4,
            relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True,
            position_buckets=4, norm_rel_ebd="layer_norm", type_vocab_size=0,
        ),
        sentences,
        sentence_losses,
    ),
    Case(
        "Longformer",
        build(
            "LongformerForSequenceClassification", "LongformerConfig", **TEXT, num_labels=4,
            attention_window=4,
        ),
        sentences,
        sentence_losses,
    ),
    Case(
        "Qwen3-Next",
        mixture(
            model="Qwen3NextForCausalLM", config="Qwen3NextConfig", **DECODER,
            layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=4,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
        tokens,
        language_losses,
        single=True,
    ),
    Case(
        "T5",
        build(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8,
            d_ff=24, num_layers=LAYERS, num_heads=HEADS, pad_token_id=0, eos_token_id=1,
            decoder_start_token_id=0, relative_attention_num_buckets=8,
        ),
        translation,
        translation_losses,
        True,
    ),
    Case(
        "ViT",
        build("ViTForImageClassification", "ViTConfig", **TEXT | IMAGE),
        image,
        image_losses,
    ),
    Case(
        "ResNet",
        build(
            "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
            depths=[1, 2], layer_type="basic", num_labels=4,
        ),
        image,
        image_losses,
    ),
    Case(
        "BiT, standardised convolutions",
        build(
            "BitForImageClassification", "BitConfig", embedding_size=8, hidden_sizes=[8, 16],
            depths=[1, 2], num_groups=4, num_labels=4,
        ),
        image,
        image_losses,
    ),
    Case(
        "ConvNeXt",
        build(
            "ConvNextForImageClassification", "ConvNextConfig", patch_size=2, num_stages=2,
            hidden_sizes=[8, 16], depths=[1, 1], num_labels=4,
        ),
        image,
        image_losses,
    ),
    Case(
        "Swin",
        build(
            "SwinForImageClassification", "SwinConfig", image_size=8, patch_size=1, embed_dim=8,
            depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=4,
            attn_implementation="eager",
        ),
        image,
        image_losses,
    ),
    Case(
        "Pixtral, images in one row",
        build(
            "PixtralVisionModel", "PixtralVisionConfig", hidden_size=WIDTH, intermediate_size=24,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=8, image_size=16,
            patch_size=4, num_channels=3,
        ),
        images_of_several_sizes,
        packed_image_losses,
        True,
    ),
    Case(
        "Pixtral, images in one row, eager attention",
        build(
            "PixtralVisionModel", "PixtralVisionConfig", hidden_size=WIDTH, intermediate_size=24,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=8, image_size=16,
            patch_size=4, num_channels=3, attn_implementation="eager",
        ),
        images_of_several_sizes,
        packed_image_losses,
        True,
    ),
    Case(
        "CLIP",
        build(
            "CLIPModel", "CLIPConfig", projection_dim=8,
            text_config={**TEXT, "projection_dim": 8},
            vision_config={**TEXT, **IMAGE, "projection_dim": 8},
        ),
        pairs,
        tower_losses,
    ),
    Case(
        "Wav2Vec2",
        build(
            "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **TEXT, num_labels=4,
            conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
        ),
        sound,
        sound_losses,
    ),
    Case(
        "Whisper",
        build(
            "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY,
            num_mel_bins=4, d_model=WIDTH, encoder_layers=LAYERS, encoder_attention_heads=HEADS,
            decoder_layers=LAYERS, decoder_attention_heads=HEADS, encoder_ffn_dim=24,
            decoder_ffn_dim=24, max_source_positions=8, max_target_positions=16, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        speech,
        speech_losses,
    ),
]  # fmt: skip
