"""The architectures that people fine-tune, each as a tiny model with random weights and no dropout, and its batches."""

import torch
import transformers as hf

VOCABULARY, CLASSES, LENGTH, WIDTH = 32, 3, 6, 16
GROUPED = ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"]  # have experts in one tensor

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, **TOKENS}
SIZES = {**TEXT, "num_attention_heads": 2, "intermediate_size": 20, "max_position_embeddings": 12}
ENCODER = {**SIZES, "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_dropout": 0.0}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
DECODER = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.0}
GEMMA = {**DECODER, "sliding_window": 4, "query_pre_attn_scalar": 8}
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}
MAMBA = {**TEXT, "state_size": 4, "conv_kernel": 3, "expand": 2}
BOTH = {  # encoder and decoder
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "dropout": 0.0, **TOKENS,
}  # fmt: skip
IMAGE = {"image_size": 8, "num_labels": CLASSES}
VISION = {
    "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
SPEECH = {
    **ENCODER, **NO_DROPOUT, "conv_dim": [8, 8], "conv_kernel": [4, 2], "conv_stride": [4, 2],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
}  # fmt: skip


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


def transcribed_waves():
    return {"input_values": torch.randn(2, 160), "labels": torch.randint(3, VOCABULARY, (2, 4))}


def transcribed_spectra():
    return {"input_features": torch.randn(2, 4, 16), "labels": torch.randint(3, VOCABULARY, (2, 5))}


def captioned_images():
    ids = torch.randint(3, VOCABULARY, (4, LENGTH))
    ids[:, -1] = 2  # the end of the text, where its representation is read
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8), "return_loss": torch.tensor(True)}


def text_with_images():
    ids = torch.randint(4, VOCABULARY, (2, 9))
    ids[:, :4] = 3  # one place for each of the image's four patches
    labels = ids.masked_fill(ids == 3, -100)
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "labels": labels}


def classifier(kind, **config):
    return f"{kind}ForSequenceClassification", f"{kind}Config", {**ENCODER, **config}, labelled_text


def masked_lm(kind, **config):
    return f"{kind}ForMaskedLM", f"{kind}Config", {**ENCODER, **config}, next_tokens


def causal_lm(kind, sizes, **config):
    return f"{kind}ForCausalLM", f"{kind}Config", {**sizes, **config}, next_tokens


def generator(kind, batch, **config):
    return f"{kind}ForConditionalGeneration", f"{kind}Config", config, batch


def image_classifier(kind, **config):
    return f"{kind}ForImageClassification", f"{kind}Config", {**IMAGE, **config}, labelled_images


# name -> the classes of the model and of its config, the config, a batch
ARCHITECTURES = {
    # ---- encoders
    "bert": classifier("Bert"),
    "roberta": classifier("Roberta"),
    "deberta-v2": classifier(
        "DebertaV2", **{**DEBERTA, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        position_biased_input=False, type_vocab_size=0,
    ),
    "deberta": classifier("Deberta", **DEBERTA),  # writes into what its linear layers return
    "deberta-v2-masked-lm": masked_lm("DebertaV2", legacy=False),  # its head reads the table past its module
    "modernbert": classifier(
        "ModernBert", attention_dropout=0.0, mlp_dropout=0.0, embedding_dropout=0.0, classifier_dropout=0.0,
        cls_token_id=1, sep_token_id=2, local_attention=4, attn_implementation="eager",
    ),
    "albert": classifier("Albert", embedding_size=8, classifier_dropout_prob=0.0),
    "electra": classifier("Electra", embedding_size=8, classifier_dropout=0.0),
    "mpnet": classifier("MPNet"),
    "distilbert": classifier("DistilBert", hidden_dim=20, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0),
    "longformer": classifier("Longformer", attention_window=4),  # writes into what its linear layers return
    "mobilebert-masked-lm": masked_lm(  # its head reads the table, transposed, past its module
        "MobileBert", embedding_size=8, intra_bottleneck_size=8, num_feedforward_networks=1, trigram_input=True
    ),
    "bert-masked-lm": masked_lm("Bert"),  # a tied decoder, whose bias is reachable under two names
    # ---- decoders
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {**SIZES, "n_inner": 20, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, next_tokens,
    ),
    "bloom": causal_lm("Bloom", {**TEXT, **NO_DROPOUT}, n_head=2, n_layer=2),
    "falcon": causal_lm("Falcon", {**TEXT, **NO_DROPOUT}, num_attention_heads=2),
    "gpt-neox": causal_lm("GPTNeoX", {**SIZES, **NO_DROPOUT}),
    "opt": causal_lm("OPT", SIZES, ffn_dim=20, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0),
    "llama": causal_lm("Llama", DECODER),
    "mistral": causal_lm("Mistral", DECODER, sliding_window=4),
    "qwen2": causal_lm("Qwen2", DECODER, tie_word_embeddings=True),
    "qwen3": causal_lm("Qwen3", DECODER),
    "gemma": causal_lm("Gemma", DECODER),
    "gemma2": causal_lm("Gemma2", GEMMA, attn_implementation="eager"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, next_tokens),
    "phi": causal_lm("Phi", SIZES, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi3": causal_lm("Phi3", SIZES, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    # ---- mixtures of experts
    "mixtral": causal_lm("Mixtral", EXPERTS, num_local_experts=4),
    "qwen2-moe": causal_lm(
        "Qwen2Moe", EXPERTS, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "qwen3-moe": causal_lm("Qwen3Moe", EXPERTS, num_experts=4, moe_intermediate_size=8),
    "gpt-oss": causal_lm("GptOss", EXPERTS, num_local_experts=4, sliding_window=4),
    # ---- state space
    "mamba": causal_lm("Mamba", MAMBA, time_step_rank=4),
    "mamba2": causal_lm("Mamba2", MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    # ---- encoder-decoders
    "t5": generator(
        "T5", next_tokens, vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=20, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu",
    ),
    "bart": generator(
        "Bart", next_tokens, **BOTH, max_position_embeddings=12, decoder_start_token_id=2, forced_eos_token_id=2
    ),
    # ---- vision
    "vit": image_classifier(
        "ViT", **VISION, intermediate_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "dinov2": image_classifier("Dinov2", **VISION),
    "swinv2": image_classifier(  # writes into what its linear layers return
        "Swinv2", patch_size=1, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2, drop_path_rate=0.0
    ),
    "convnext": image_classifier(
        "ConvNext", num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[8, 12], depths=[1, 1],
        drop_path_rate=0.0, layer_scale_init_value=0.5,
    ),
    "resnet": image_classifier(
        "ResNet", num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic"
    ),
    # ---- audio
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, transcribed_waves),  # a convolution under weight norm
    "wavlm": ("WavLMForCTC", "WavLMConfig", SPEECH, transcribed_waves),  # its projections are read and never called
    "whisper": generator(
        "Whisper", transcribed_spectra, **BOTH, num_mel_bins=4, max_source_positions=8, max_target_positions=12,
        attention_dropout=0.0, activation_dropout=0.0, decoder_start_token_id=1, apply_spec_augment=False,
        suppress_tokens=[], begin_suppress_tokens=[],
    ),
    # ---- images and text
    "clip": (
        "CLIPModel", "CLIPConfig",
        {"text_config": SIZES, "vision_config": {**VISION, "intermediate_size": 20}, "projection_dim": 8},
        captioned_images,
    ),
    "siglip": (  # pools an image by nn.MultiheadAttention
        "SiglipModel", "SiglipConfig",
        {"text_config": SIZES, "vision_config": {**VISION, "intermediate_size": 20}}, captioned_images,
    ),
    "llava": generator(
        "Llava", text_with_images, vision_config={**VISION, "intermediate_size": 20, "model_type": "clip_vision_model"},
        text_config={**DECODER, "model_type": "llama"}, image_token_index=3, image_seq_length=4,
        vision_feature_layer=-1,
    ),
}  # fmt: skip


def build(name, dtype=torch.float64, batches=3, seed=0):
    torch.manual_seed(seed)
    model_class, config_class, config, batch = ARCHITECTURES[name]
    model = getattr(hf, model_class)(getattr(hf, config_class)(**config))
    with torch.no_grad():
        for parameter in model.parameters():  # away from the zeros and ones that many a parameter starts at
            parameter.add_(0.1 * torch.randn_like(parameter))
    drawn = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch().items()} for _ in range(batches)]
    return model.to(dtype).train(), drawn
