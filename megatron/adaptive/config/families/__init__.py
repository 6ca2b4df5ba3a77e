"""Families of Hugging Face models, each a class that describes keys, settings and weights.

A family is a subclass of :class:`Family` in a file of this folder, or anywhere else. In that case,
users name it by ``--hf-family package.module:Class``, or a package publishes it as an entry point
of the group ``megatron_adaptive.families``, with the model's ``model_type`` as its name.
"""

from megatron.adaptive.config.families.base_family import Family

__all__ = ["Family"]
