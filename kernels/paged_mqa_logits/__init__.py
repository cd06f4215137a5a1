"""Paged MQA logits: ReLU-weighted scores of query tokens against a paged KV cache."""
