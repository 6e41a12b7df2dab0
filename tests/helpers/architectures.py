"""The architectures that people fine-tune, each as a tiny model with random weights, and a batch for it.

In: a name of ``ARCHITECTURES``. Out: a model and its batches. A step takes milliseconds. What is random in training
(dropout, layer drop, time masking) is off.
"""

import torch
import transformers as hf
from torch import nn

VOCABULARY, CLASSES, LENGTH, WIDTH = 32, 3, 6, 16
ARCHITECTURES = {}
GROUPED = ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"]  # have experts in one tensor

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {**SIZES, "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}
VISION = {"image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": WIDTH, "intermediate_size": 20,
          "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip


def architecture(build):
    """Lists a builder under its own name, with dashes."""
    ARCHITECTURES[build.__name__.replace("_", "-")] = build
    return build


def build(name, dtype=torch.float64, batches=3, seed=0):
    """A model in training mode whose parameters are all random, and its batches."""
    torch.manual_seed(seed)
    model, batch = ARCHITECTURES[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # away from the zeros and ones that many a parameter starts at
            parameter.add_(0.1 * torch.randn_like(parameter))
    drawn = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch().items()} for _ in range(batches)]
    return model.to(dtype).train(), drawn


def tokens():
    ids = torch.randint(3, VOCABULARY, (4, LENGTH))
    ids[0, -2:] = 0  # padding
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def labelled_text():
    return {**tokens(), "labels": torch.randint(CLASSES, (4,))}


def next_tokens():
    batch = tokens()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def labelled_images():
    return {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(CLASSES, (4,))}


# -------------------------------------------------------------------------------------------- encoders


@architecture
def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)), labelled_text


@architecture
def roberta():
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**ENCODER)), labelled_text


@architecture
def deberta_v2():
    config = hf.DebertaV2Config(
        **ENCODER, relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], pooler_dropout=0.0, position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip
    return hf.DebertaV2ForSequenceClassification(config), labelled_text


@architecture
def deberta():
    """Writes into what its linear layers return."""
    config = hf.DebertaConfig(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_dropout=0.0)
    return hf.DebertaForSequenceClassification(config), labelled_text


@architecture
def deberta_v2_masked_lm():
    """The head reads the table of the word embeddings past its module."""
    config = hf.DebertaV2Config(**ENCODER, legacy=False)
    return hf.DebertaV2ForMaskedLM(config), next_tokens


@architecture
def modernbert():
    config = hf.ModernBertConfig(
        **ENCODER, attention_dropout=0.0, mlp_dropout=0.0, embedding_dropout=0.0, classifier_dropout=0.0,
        cls_token_id=1, sep_token_id=2, local_attention=4, attn_implementation="eager",
    )  # fmt: skip
    return hf.ModernBertForSequenceClassification(config), labelled_text


@architecture
def albert():
    config = hf.AlbertConfig(**ENCODER, embedding_size=8, classifier_dropout_prob=0.0)
    return hf.AlbertForSequenceClassification(config), labelled_text


@architecture
def electra():
    config = hf.ElectraConfig(**ENCODER, embedding_size=8, classifier_dropout=0.0)
    return hf.ElectraForSequenceClassification(config), labelled_text


@architecture
def mpnet():
    return hf.MPNetForSequenceClassification(hf.MPNetConfig(**ENCODER)), labelled_text


@architecture
def distilbert():
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=20, max_position_embeddings=12, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=CLASSES, pad_token_id=0,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config), labelled_text


@architecture
def longformer():
    """Writes into what its linear layers return."""
    return hf.LongformerForSequenceClassification(hf.LongformerConfig(**ENCODER, attention_window=4)), labelled_text


@architecture
def mobilebert_masked_lm():
    """The head reads the table of the word embeddings, transposed, past its module."""
    config = hf.MobileBertConfig(
        **ENCODER, embedding_size=8, intra_bottleneck_size=8, num_feedforward_networks=1, trigram_input=True
    )
    return hf.MobileBertForMaskedLM(config), next_tokens


@architecture
def bert_masked_lm():
    """The decoder is tied to the word embeddings, its bias is reachable under two names."""
    return hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), next_tokens


# -------------------------------------------------------------------------------------------- decoders


@architecture
def gpt2():
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=12, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=20, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), next_tokens


@architecture
def bloom():
    config = hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.BloomForCausalLM(config), next_tokens


@architecture
def falcon():
    config = hf.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.0,
        attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.FalconForCausalLM(config), next_tokens


@architecture
def gpt_neox():
    config = hf.GPTNeoXConfig(**SIZES, attention_dropout=0.0, hidden_dropout=0.0)
    return hf.GPTNeoXForCausalLM(config), next_tokens


@architecture
def opt():
    config = hf.OPTConfig(**SIZES, ffn_dim=20, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0)
    return hf.OPTForCausalLM(config), next_tokens


@architecture
def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), next_tokens


@architecture
def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=4)), next_tokens


@architecture
def qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER, tie_word_embeddings=True)), next_tokens


@architecture
def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER)), next_tokens


@architecture
def gemma():
    return hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER)), next_tokens


@architecture
def gemma2():
    config = hf.Gemma2Config(**DECODER, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager")
    return hf.Gemma2ForCausalLM(config), next_tokens


@architecture
def gemma3():
    config = hf.Gemma3TextConfig(**DECODER, sliding_window=4, query_pre_attn_scalar=8)
    return hf.Gemma3ForCausalLM(config), next_tokens


@architecture
def phi():
    config = hf.PhiConfig(**SIZES, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return hf.PhiForCausalLM(config), next_tokens


@architecture
def phi3():
    config = hf.Phi3Config(**SIZES, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return hf.Phi3ForCausalLM(config), next_tokens


# --------------------------------------------------------------------------------- mixtures of experts


@architecture
def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, **EXPERTS, num_local_experts=4)), next_tokens


@architecture
def qwen2_moe():
    config = hf.Qwen2MoeConfig(
        **DECODER, **EXPERTS, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    return hf.Qwen2MoeForCausalLM(config), next_tokens


@architecture
def qwen3_moe():
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**DECODER, **EXPERTS, num_experts=4, moe_intermediate_size=8)
    ), next_tokens


@architecture
def gpt_oss():
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(**DECODER, **EXPERTS, num_local_experts=4, sliding_window=4)
    ), next_tokens


# ----------------------------------------------------------------------------------------- state space


@architecture
def mamba():
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, conv_kernel=3, expand=2,
        time_step_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.MambaForCausalLM(config), next_tokens


@architecture
def mamba2():
    config = hf.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, conv_kernel=3, expand=2,
        num_heads=4, head_dim=8, n_groups=1, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.Mamba2ForCausalLM(config), next_tokens


# ------------------------------------------------------------------------------------ encoder-decoders


@architecture
def t5():
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), next_tokens


@architecture
def bart():
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=20, max_position_embeddings=12, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), next_tokens


# ---------------------------------------------------------------------------------------------- vision


@architecture
def vit():
    config = hf.ViTConfig(**VISION, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.ViTForImageClassification(config), labelled_images


@architecture
def dinov2():
    sizes = {key: value for key, value in VISION.items() if key != "intermediate_size"}
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**sizes, num_labels=CLASSES)), labelled_images


@architecture
def swinv2():
    """Writes into what its linear layers return."""
    config = hf.Swinv2Config(
        image_size=8, patch_size=1, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2, drop_path_rate=0.0,
        num_labels=CLASSES,
    )  # fmt: skip
    return hf.Swinv2ForImageClassification(config), labelled_images


@architecture
def convnext():
    config = hf.ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[8, 12], depths=[1, 1], image_size=8,
        drop_path_rate=0.0, num_labels=CLASSES, layer_scale_init_value=0.5,
    )  # fmt: skip
    return hf.ConvNextForImageClassification(config), labelled_images


class ConvNet(nn.Module):
    """The smallest net whose batch norms keep running statistics: buffers that training changes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values, labels):
        logits = self.head(self.features(pixel_values).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@architecture
def convnet_with_batch_norm():
    return ConvNet(), labelled_images


@architecture
def resnet():
    config = hf.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    return hf.ResNetForImageClassification(config), labelled_images


# ----------------------------------------------------------------------------------------------- audio


SPEECH = {
    **ENCODER, "conv_dim": [8, 8], "conv_kernel": [4, 2], "conv_stride": [4, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
}  # fmt: skip


@architecture
def wav2vec2():
    """Its convolution over positions is under weight norm."""
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)), transcribed_waves


@architecture
def wavlm():
    """Its attention reads the weights of its projections and never calls them."""
    return hf.WavLMForCTC(hf.WavLMConfig(**SPEECH)), transcribed_waves


def transcribed_waves():
    return {"input_values": torch.randn(2, 160), "labels": torch.randint(3, VOCABULARY, (2, 4))}


@architecture
def whisper():
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=4, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=20,
        max_source_positions=8, max_target_positions=12, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, apply_spec_augment=False,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), transcribed_spectra


def transcribed_spectra():
    return {"input_features": torch.randn(2, 4, 16), "labels": torch.randint(3, VOCABULARY, (2, 5))}


# ------------------------------------------------------------------------------------- images and text


@architecture
def clip():
    config = hf.CLIPConfig(text_config=SIZES, vision_config=VISION, projection_dim=8)
    return hf.CLIPModel(config), captioned_images


@architecture
def siglip():
    """Pools an image by nn.MultiheadAttention."""
    return hf.SiglipModel(hf.SiglipConfig(text_config=SIZES, vision_config=VISION)), captioned_images


def captioned_images():
    ids = torch.randint(3, VOCABULARY, (4, LENGTH))
    ids[:, -1] = 2  # the end of the text, where its representation is read
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8), "return_loss": torch.tensor(True)}


@architecture
def llava():
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**DECODER), image_token_index=3,
        image_seq_length=4, vision_feature_layer=-1,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config), text_with_images


def text_with_images():
    ids = torch.randint(4, VOCABULARY, (2, 9))
    ids[:, :4] = 3  # one place for each of the image's four patches
    labels = ids.masked_fill(ids == 3, -100)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": labels}
