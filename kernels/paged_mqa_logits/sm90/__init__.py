"""Paged MQA logits for Hopper, in Gluon: TMA, warpgroup products, a producer warp, up to four consumer warpgroups."""
