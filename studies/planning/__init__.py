"""Parts of ``studies.planner``, one module for each part."""
