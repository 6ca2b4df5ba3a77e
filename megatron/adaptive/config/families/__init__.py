"""Families of Hugging Face models, each a class that describes keys, settings and weights.

A family is a subclass of :class:`Family` in a file of this folder, or anywhere else: as
``--hf-family package.module:Class``, or as an entry point of the group
``megatron_adaptive.families`` whose name is the model's ``model_type``.
"""

from megatron.adaptive.config.families.base_family import Family

__all__ = ["Family"]
