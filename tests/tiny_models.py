"""Tiny seeded checkpoints of each architecture, made by `transformers` and saved as it saves them.

Run as `python -m tests.tiny_models FOLDER [ARCHITECTURE]` to make one by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
VOCABULARY_SIZE = 640
EOS_ID = 257


def make_tiny(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    tokenizer: bool = False,
    shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model: 5 layers, hidden 64, 4 query and 2 KV heads of 16; std 1, so that logits are apart.

    Norms and biases are random too, so that one which is skipped or swapped shows. `overrides` are fields of the
    configuration; `shard_size` like "100KB" cuts the weights into shards. Returns the folder.
    """
    import torch
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    extra: dict[str, Any] = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    config = config_class(
        **{
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "initializer_range": 1.0,
            "tie_word_embeddings": False,
            "bos_token_id": 256,
            "eos_token_id": EOS_ID,
            "pad_token_id": None,
            **extra,
            **overrides,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer for the tiny models: 256 byte tokens, two special ones, and merges up to 640 ids."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 2, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    built.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    data = json.loads(built.to_str())
    # Ids 256 and 257 are the special tokens in the models' configurations; learnt merges move up by two.
    data["model"]["vocab"] = {
        token: number if number < 256 else number + 2 for token, number in data["model"]["vocab"].items()
    }
    data["added_tokens"] = [
        {
            "id": number,
            "content": content,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, content in ((256, "<s>"), (EOS_ID, "</s>"))
    ]
    data["model"]["vocab"].update({"<s>": 256, "</s>": EOS_ID})
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    template = (
        "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template + "{% if add_generation_prompt %}<s>assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    make_tiny(Path(sys.argv[1]), *sys.argv[2:3], tokenizer=True)
