"""The model: from `config.json` and weights to logits and sampled tokens."""
