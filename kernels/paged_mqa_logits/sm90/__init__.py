"""Paged MQA logits for Hopper, in Gluon: TMA, warpgroup products, one producer warp and up to four consumer warpgroups."""
