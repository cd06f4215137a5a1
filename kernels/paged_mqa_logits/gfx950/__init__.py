"""Paged MQA logits for CDNA4 (gfx950: MI350X, MI355X) in Gluon."""
