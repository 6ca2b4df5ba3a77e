"""Describes families of Hugging Face models: their keys, settings and weights.

Each family is a subclass of :class:`Family`, in a file of this folder or in a user's code. To use a
user's family, pass ``--hf-family package.module:Class``. As an alternative, publish the class as an
entry point in the group ``megatron_adaptive.families``, under the ``model_type`` of its models.
"""

from megatron.adaptive.config.families.base_family import Family

__all__ = ["Family"]
