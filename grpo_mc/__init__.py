"""grpo_mc: GRPO post-training of language models on Megatron-Core, on GPUs and on machines without one.

The packages form layers; imports point downwards only (tests/unit/test_layers.py walks them):
config -> ops -> algorithms, data -> megatron, rewards -> rollout -> pipeline -> monitor, cli.
"""

__version__ = "0.1.0"
