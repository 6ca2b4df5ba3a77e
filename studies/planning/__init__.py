"""Parts of ``studies.planner``, one module each."""
